"""The learning rate of every step against the formula."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import numpy as np
import pytest

from alphastomics.train import PlanConfig


class Rates(pl.Callback):
    """Learning rate, and how far the training was, before each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        (group,) = trainer.optimizers[0].param_groups
        self.seen.append((group["lr"], pl_module.progress()))


def formula(schedule: str, share: float) -> float:
    if schedule == "cosine":
        return (1 + math.cos(math.pi * share)) / 2
    return 1 - share if schedule == "linear" else 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_rates_match_the_formula(make_plan, fit, schedule):
    rates = Rates()
    plan = make_plan(
        mode="expr_to_pos",
        lr=1e-3,
        warmup_steps=3,
        final_lr=0.1,
        lr_schedule=schedule,
        modality_dropout=1.0,
    )
    fit(plan, max_epochs=4, callbacks=[rates])
    total = len(rates.seen)
    assert total == plan.trainer.global_step == 12
    for n, (rate, share) in enumerate(rates.seen):
        assert share == n / total
        expected = min(1, (n + 1) / 3) * (0.1 + 0.9 * formula(schedule, n / total))
        np.testing.assert_allclose(rate, 1e-3 * expected, rtol=1e-9)


def test_schedules_differ_and_cosine_is_the_default():
    assert PlanConfig() == PlanConfig(lr_schedule="cosine")
    assert len({formula(schedule, 0.3) for schedule in ("cosine", "linear", "constant")}) == 3


def test_an_unknown_schedule_raises():
    with pytest.raises(ValueError, match="lr_schedule='step'.*'cosine', 'linear', 'constant'"):
        PlanConfig(lr_schedule="step")
