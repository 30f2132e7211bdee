"""Which average is left when training stops early: the one with the lowest loss, also after an interruption."""

from __future__ import annotations

import re

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from alphastomics.train import MovingAverage
from alphastomics.train.checkpoint import LastCheckpoint
from alphastomics.train.ema import BestAverage

HELD_OUT = {"validation_size": 0.3}


def weights(plan) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in plan.module.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


class Dead(pl.Callback):
    """The end of everything in an epoch."""

    def __init__(self, epoch: int, error: type[BaseException] = OSError) -> None:
        self.epoch, self.error = epoch, error

    def on_train_batch_start(self, trainer, *_):
        if trainer.current_epoch == self.epoch:
            raise self.error("dead")


@pytest.fixture
def rising(monkeypatch):
    """Let both early stopping and its keeper of the best see a validation loss that falls once."""
    losses = (5.0, 3.0, 4.0, 3.5, 6.0, 7.0)
    callback_metrics = pl.Trainer.callback_metrics.fget

    def scripted_metrics(trainer):
        found = dict(callback_metrics(trainer))
        if "validation_loss" in found:
            found["validation_loss"] = torch.tensor(losses[trainer.current_epoch])
        return found

    monkeypatch.setattr(pl.Trainer, "callback_metrics", property(scripted_metrics))


class Averages(pl.Callback):
    """The average at the end of every epoch."""

    def __init__(self) -> None:
        self.seen: list[list[torch.Tensor]] = []

    def on_train_epoch_end(self, trainer, pl_module):
        ema = next(c for c in trainer.callbacks if isinstance(c, MovingAverage))
        self.seen.append([average.clone() for average in ema.average])


STOPPED = {"early_stopping": True, "early_stopping_patience": 2, "max_epochs": 20, "data": HELD_OUT}


def test_the_best_average_is_kept_and_not_the_last(make_plan, fit, rising, caplog):
    plan, averages = make_plan(), Averages()
    with caplog.at_level("INFO", logger="alphastomics"):
        fit(plan, callbacks=[averages], **STOPPED)
    assert len(averages.seen) == 4
    assert equal(weights(plan), averages.seen[1])
    assert not equal(weights(plan), averages.seen[3])
    assert re.search("epoch 1.*validation_loss.* 3", caplog.text)


def test_without_early_stopping_the_last_average_is_kept(make_plan, fit, rising):
    plan, averages = make_plan(), Averages()
    fit(plan, callbacks=[averages], max_epochs=4, data=HELD_OUT)
    assert equal(weights(plan), averages.seen[3])


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_the_best_average_is_kept_after_an_error(make_plan, fit, rising, error):
    plan, averages = make_plan(), Averages()
    run = lambda: fit(plan, callbacks=[averages, Dead(3, error)], **STOPPED)
    if error is OSError:
        with pytest.raises(OSError, match="dead"):
            run()
    else:
        run()
    assert equal(weights(plan), averages.seen[1])


def test_the_best_survives_an_interruption(make_plan, fit, rising, tmp_path):
    """The same as in a training that went on."""
    whole = make_plan()
    fit(whole, **STOPPED)
    path = tmp_path / "last.ckpt"
    with pytest.raises(OSError, match="dead"):
        fit(make_plan(), checkpoint=LastCheckpoint(path, {}, 1), callbacks=[Dead(3)], **STOPPED)
    resumed = make_plan(seed=5)
    fit(resumed, checkpoint=LastCheckpoint(path, {}, 1), ckpt_path=path, **STOPPED)
    assert equal(weights(resumed), weights(whole))
    state = torch.load(path, weights_only=True)["callbacks"]["BestAverage"]
    assert (state["lowest"], state["epoch"]) == (3.0, 1)
    assert not equal(state["weights"], torch.load(path, weights_only=True)["callbacks"]["MovingAverage"]["average"])


def test_a_nan_loss_is_never_the_best():
    best = BestAverage(MovingAverage(0.9), "validation_loss")
    best.ema.average = [torch.ones(2)]

    class Trainer:
        current_epoch = 0
        callback_metrics = {"validation_loss": torch.tensor(float("nan"))}

    best.on_train_epoch_end(Trainer(), None)
    assert best.weights == []
    assert np.isinf(best.lowest)
