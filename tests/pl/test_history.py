"""``pl.history``: curves of logged metrics."""

from __future__ import annotations

from types import SimpleNamespace

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from alphastomics.pl import history


def table(name: str, values: list[float], clock: str = "epoch") -> pd.DataFrame:
    return pd.DataFrame({name: values}, index=pd.RangeIndex(len(values), name=clock))


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    return {
        "train_position": table("train_position", [2.0, 1.0, 0.5]),
        "validation_loss": table("validation_loss", [4.0, np.nan, 2.0]),
        "train_loss": table("train_loss", [3.0, 2.0, 1.0]),
        "train_loss_step": table("train_loss_step", [3.0] * 9, clock="step"),
    }


def curves(ax) -> dict[str, list[float]]:
    return {line.get_label(): line.get_ydata().tolist() for line in ax.lines}


def test_training_and_validation_are_plotted(tables):
    ax = history(SimpleNamespace(history=tables), show=False)
    assert list(curves(ax)) == ["train_loss", "validation_loss"]
    assert curves(ax)["train_loss"] == [3, 2, 1]
    assert ax.lines[0].get_xdata().tolist() == [0, 1, 2]
    assert ax.get_xlabel() == "epoch"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["train_loss", "validation_loss"]


def test_keys_are_chosen(tables):
    ax = history(tables, keys="train_loss_step", show=False)
    assert list(curves(ax)) == ["train_loss_step"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "train_loss_step")
    assert list(curves(history(tables, keys=["train_position", "train_loss"], show=False))) == [
        "train_position",
        "train_loss",
    ]
    del tables["train_loss"], tables["validation_loss"]
    assert list(curves(history(tables, show=False))) == ["train_position"]


def test_one_epoch_is_a_dot(tables):
    ax = history({"train_loss": tables["train_loss"].iloc[:1]}, show=False)
    assert ax.lines[0].get_marker() == "o"
    assert history(tables, show=False).lines[0].get_marker() == "None"


def test_curves_are_moving_averages_in_front_of_their_values():
    values = np.tile([1.0, 3.0], 30)
    ax = history({"train_loss": table("train_loss", values.tolist())}, show=False)
    raw, mean = ax.lines
    assert raw.get_ydata().tolist() == values.tolist()
    assert raw.get_alpha() < 1
    assert raw.get_color() == mean.get_color()
    np.testing.assert_allclose(mean.get_ydata()[1:-1], np.convolve(values, np.full(3, 1 / 3), "valid"))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["train_loss"]
    (line,) = history({"train_loss": table("train_loss", values.tolist())}, smooth=1, show=False).lines
    assert line.get_ydata().tolist() == values.tolist()


def test_values_that_are_not_logged_in_every_epoch_are_connected(tables):
    line = history(tables, keys="validation_loss", show=False).lines[0]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0, 2], [4, 2])


def test_the_title_has_the_held_out_score_of_the_last_training(tables):
    trainings = ({"held_out": {"distance_spearman": 0.1}}, {"held_out": {"distance_spearman": 0.876}})
    model = SimpleNamespace(history=tables, trainings_=trainings)
    assert history(model, show=False).get_title().endswith("distance Spearman 0.88")
    model.trainings_ = ({"n_steps": 3},)
    assert history(model, show=False).get_title() == ""


def test_given_axes_are_used_and_nothing_is_shown(tables, monkeypatch, tmp_path):
    monkeypatch.setattr(plt, "show", lambda: pytest.fail("shown"))
    _, given = plt.subplots()
    assert history(tables, ax=given, show=True, save=tmp_path / "curves.pdf", color="k") is given
    assert given.lines[0].get_color() == "k"
    assert (tmp_path / "curves.pdf").exists()
    assert len(plt.get_fignums()) == 1


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ("loss", KeyError, "'loss'.*'train_position'"),
        (["train_loss", "train_loss_step"], ValueError, "keys=.*epoch.*step"),
        ([], ValueError, "keys="),
    ],
)
def test_invalid_keys_raise(tables, keys, error, message):
    with pytest.raises(error, match=message):
        history(tables, keys=keys)
    assert not plt.get_fignums()


def test_smoothing_needs_a_value(tables):
    with pytest.raises(ValueError, match="smooth=0"):
        history(tables, smooth=0)
    assert not plt.get_fignums()


def test_an_untrained_model_has_no_history():
    for empty in ({}, None):
        with pytest.raises(ValueError, match="train"):
            history(SimpleNamespace(history=empty))
