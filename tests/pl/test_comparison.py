"""``pl.comparison``, on tables made by hand."""

from __future__ import annotations

import anndata as ad
import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from alphastomics import pl


@pytest.fixture
def tables() -> dict[str, pd.DataFrame]:
    curves = pd.DataFrame(
        {
            "configuration": ["a"] * 4 + ["b"] * 2,
            "seed": [0, 0, 1, 1, 0, 0],
            "step": [10, 20, 10, 30, 5, 9],
            "seconds": [1.0, 2.0, 1.0, 3.0, 1.5, 2.5],
            "train_loss": [4.0, 2.0, 6.0, 4.0, 3.0, 1.0],
            "validation_loss": [5.0, 3.0, 5.0, 3.0, np.nan, 2.0],
        }
    )
    runs = pd.DataFrame(
        {
            "configuration": ["a", "a", "b", "chance"],
            "seed": [0, 1, 0, 0],
            "held_out": "s",
            "failed": [False, False, False, False],
            "parameters": pd.array([10, 10, 20, None], dtype="Int64"),
            "distance_spearman": [0.2, 0.6, np.nan, 0.0],
            "rare_score": [1.0, 2.0, 3.0, 4.0],
        }
    )
    return {"runs": runs, "curves": curves}


def test_curves_are_means_over_seeds_where_all_have_values(tables):
    axes = pl.comparison(tables, show=False)
    training, validation = axes.flat[:2]
    assert [line.get_label() for line in training.lines] == ["a", "b"]
    x, y = training.lines[0].get_data()
    assert (x[0], x[-1]) == (1.0, 2.0)
    # Seed 0 falls from 4 to 2; seed 1 from 6 to 5 until then.
    assert (y[0], y[-1]) == (pytest.approx(5.0), pytest.approx(3.5))
    (band,) = training.collections
    edge = band.get_paths()[0].vertices
    assert edge[:, 1].max() == pytest.approx(5 + np.std([4, 6], ddof=1))
    assert training.lines[1].get_ydata().tolist() == [3.0, 1.0]
    assert validation.lines[1].get_data()[1].tolist() == [2.0]
    assert (training.get_xlabel(), validation.get_ylabel()) == ("seconds", "validation loss")
    assert [text.get_text() for text in training.get_legend().get_texts()] == ["a", "b"]


def test_seeds_that_share_a_point_or_none(tables):
    """One shared point is a marker; of runs without a common range each is drawn."""
    tables["curves"] = tables["curves"].iloc[[0, 2, 4]]
    training = pl.comparison(tables, show=False).flat[0]
    assert [line.get_marker() for line in training.lines] == ["o", "o"]
    assert training.lines[0].get_data()[1].tolist() == [5.0]
    tables["curves"].loc[2, "seconds"] = 7.0
    training = pl.comparison(tables, show=False).flat[0]
    assert [line.get_xdata().tolist() for line in training.lines] == [[1.0], [7.0], [1.5]]
    assert [text.get_text() for text in training.get_legend().get_texts()] == ["a", "b"]


def test_curves_by_step(tables):
    training = pl.comparison(tables, by="step", show=False).flat[0]
    assert training.lines[0].get_xdata()[[0, -1]].tolist() == [10, 20]
    assert training.get_xlabel() == "step"


def test_scores_show_every_run_mean_and_deviation(tables):
    panel = pl.comparison(tables, scores="distance_spearman", show=False).flat[2]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["a", "b", "chance"]
    rows = [points.get_offsets().tolist() for points in panel.collections if len(points.get_offsets()) > 0]
    assert [[0.2, 0.0], [0.6, 0.0]] in rows
    (mean, low_high) = panel.containers[0].lines[0].get_xdata()[0], panel.containers[0].lines[2][0].get_segments()[0]
    assert mean == pytest.approx(0.4)
    assert low_high[:, 0].tolist() == pytest.approx(
        [0.4 - np.std([0.2, 0.6], ddof=1), 0.4 + np.std([0.2, 0.6], ddof=1)]
    )
    assert len(panel.containers) == 2  # b has no score
    assert panel.get_ylim() == (2.5, -0.5)


def test_default_panels_are_the_scores_of_the_runs(tables):
    axes = pl.comparison(tables, show=False)
    assert axes.shape == (2, 3)
    assert [ax.get_xlabel() for ax in axes.flat] == ["seconds", "seconds", "distance spearman", "parameters", "", ""]
    assert [ax.axison for ax in axes.flat] == [True] * 4 + [False] * 2
    many = pl.comparison(tables, scores=["rare_score", "parameters", "distance_spearman"], show=False)
    assert [ax.get_xlabel() for ax in many.flat][2:5] == ["rare score", "parameters", "distance spearman"]


def test_tables_from_an_anndata(tables, tmp_path):
    cells = ad.AnnData(np.zeros((2, 2)), uns={"mine": tables})
    cells.write_h5ad(tmp_path / "cells.h5ad")
    axes = pl.comparison(ad.read_h5ad(tmp_path / "cells.h5ad"), key="mine", show=False)
    assert axes.flat[0].lines[0].get_ydata()[0] == pytest.approx(5.0)


def test_given_axes_are_used_and_nothing_is_shown(tables, monkeypatch, tmp_path):
    monkeypatch.setattr(plt, "show", lambda: pytest.fail("shown"))
    _, given = plt.subplots(1, 3)
    axes = pl.comparison(tables, scores="rare_score", ax=given, show=True, save=tmp_path / "x.png")
    assert axes.ravel().tolist() == given.tolist()
    assert (tmp_path / "x.png").exists()
    assert len(plt.get_fignums()) == 1
    with pytest.raises(ValueError, match=r"ax\b.* 3 .* 4"):
        pl.comparison(tables, ax=given)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scores": "score"}, KeyError, "'score'.*scores=.*'parameters', 'distance_spearman'"),
        ({"by": "epoch"}, ValueError, "by='epoch'"),
    ],
)
def test_invalid_arguments_raise(tables, arguments, error, message):
    with pytest.raises(error, match=message):
        pl.comparison(tables, **arguments)
    assert not plt.get_fignums()


def test_missing_tables_raise():
    with pytest.raises(KeyError, match=r"tl\.compare.*key="):
        pl.comparison(ad.AnnData(np.zeros((1, 1))))
