"""Tables of logged values, and how they continue."""

from __future__ import annotations

from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch

from alphastomics.train import History
from alphastomics.train.callbacks import MetricsFile


def run(history: History, values: list[dict[str, float]]) -> History:
    known: dict[str, torch.Tensor] = {}
    for epoch, metrics in enumerate(values):
        known |= {name: torch.tensor(value) for name, value in metrics.items()}
        trainer = SimpleNamespace(current_epoch=epoch, callback_metrics=known)
        if "validation_loss" in metrics:
            history.on_validation_end(trainer, None)
        history.on_train_epoch_end(trainer, None)
    return history


def test_tables_match_scvi():
    history = run(History(), [{"train_loss": 3.0, "validation_loss": 5.0, "loss": 9.0}, {"train_loss": 2.0}])
    tables = history.tables()
    assert set(tables) == {"train_loss", "validation_loss"}
    expected = pd.DataFrame({"train_loss": [3.0, 2.0]}, index=pd.Index([0, 1], name="epoch"))
    pd.testing.assert_frame_equal(tables["train_loss"], expected)
    assert tables["validation_loss"].index.tolist() == [0]


def test_epochs_without_validation_have_no_validation_loss():
    tables = run(History(), [{"train_loss": 3.0, "validation_loss": 5.0}, {"train_loss": 2.0}]).tables()
    assert tables["train_loss"].index.tolist() == [0, 1]
    assert tables["validation_loss"].index.tolist() == [0]


def test_further_training_continues_the_count():
    first = run(History(), [{"train_loss": 3.0}, {"train_loss": 2.0}]).tables()
    first["train_only_before"] = first["train_loss"].rename(columns={"train_loss": "train_only_before"})
    second = run(History(first), [{"train_loss": 1.0, "validation_loss": 4.0}]).tables()
    assert second["train_loss"]["train_loss"].tolist() == [3.0, 2.0, 1.0]
    assert second["train_loss"].index.tolist() == [0, 1, 2]
    assert second["train_loss"].index.name == "epoch"
    assert second["validation_loss"].index.tolist() == [2]
    assert second["train_only_before"].index.tolist() == [0, 1]
    assert first["train_loss"].index.tolist() == [0, 1]


def test_training_without_logs_keeps_the_history():
    first = run(History(), [{"train_loss": 3.0}]).tables()
    pd.testing.assert_frame_equal(History(first).tables()["train_loss"], first["train_loss"])
    assert History(None).tables() == {}


def test_a_checkpoint_restores_its_values():
    first = run(History(), [{"train_loss": 3.0}, {"train_loss": 2.0}])
    second = History()
    second.load_state_dict(first.state_dict())
    pd.testing.assert_frame_equal(second.tables()["train_loss"], first.tables()["train_loss"])


def columns(path):
    return pd.read_csv(path, index_col="epoch")


def test_metrics_equal_the_history_also_after_an_error(make_plan, fit, tmp_path):
    path = tmp_path / "metrics.csv"
    tables = fit(make_plan(), max_epochs=3, callbacks=[MetricsFile(path)]).model.history_
    assert columns(path).index.tolist() == [0, 1, 2]
    assert set(columns(path)) == set(tables)
    np.testing.assert_allclose(columns(path)["train_loss"], tables["train_loss"]["train_loss"])

    class Die(pl.Callback):
        def on_train_epoch_start(self, trainer, _):
            if trainer.current_epoch == 2:
                raise OSError("dead")

    path.unlink()
    with pytest.raises(OSError, match="dead"):
        fit(make_plan(), max_epochs=3, callbacks=[MetricsFile(path), Die()])
    assert columns(path).index.tolist() == [0, 1]
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_are_written_during_training(make_plan, fit, tmp_path, monkeypatch):
    monkeypatch.setattr(MetricsFile, "SECONDS", 0.0)
    path, seen = tmp_path / "metrics.csv", []

    class Look(pl.Callback):
        def on_train_epoch_start(self, *_):
            seen.append(len(columns(path)) if path.exists() else 0)

    fit(make_plan(), max_epochs=4, callbacks=[MetricsFile(path), Look()])
    assert seen == [0, 1, 2, 3]
