"""Lengths of contexts against the formulas in rational or extended arithmetic, and a training that is resumed."""

from __future__ import annotations

import warnings
from fractions import Fraction
from itertools import pairwise
from math import floor
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from alphastomics.train.curriculum import LengthCurriculum, LengthSchedule

if TYPE_CHECKING:
    from pathlib import Path

KINDS = ("linear", "cosine", "quadratic", "geometric")

schedules = st.builds(
    lambda shortest, more, **other: LengthSchedule(shortest=shortest, longest=shortest + more, **other),
    st.integers(1, 5000),
    st.integers(0, 100_000),
    warmup=st.integers(0, 1000),
    growth=st.integers(0, 60_000),
    kind=st.sampled_from(KINDS),
)


def reference(schedule: LengthSchedule, step: int) -> int:
    """The definition, in rational numbers or in extended precision."""
    if step < schedule.warmup:
        return schedule.shortest
    if step >= schedule.warmup + schedule.growth:
        return schedule.longest
    p = Fraction(step - schedule.warmup, schedule.growth)
    low, high = schedule.shortest, schedule.longest
    if schedule.kind == "linear":
        return floor(low + p * (high - low))
    if schedule.kind == "quadratic":
        return floor(low + p * p * (high - low))
    share = np.longdouble(p.numerator) / p.denominator
    if schedule.kind == "cosine":
        value = low + (1 - np.cos(4 * np.arctan(np.longdouble(1)) * share)) / 2 * (high - low)
    else:
        value = low * (np.longdouble(high) / low) ** share
    return floor(value + 1e-12)


@given(schedules, st.integers(0, 70_000))
def test_every_kind_equals_its_formula(schedule: LengthSchedule, step: int) -> None:
    assert schedule.length(step) == reference(schedule, step)


@given(schedules)
def test_the_length_starts_short_and_ends_long(schedule: LengthSchedule) -> None:
    end = schedule.warmup + schedule.growth
    if schedule.growth:
        assert schedule.length(0) == schedule.length(schedule.warmup) == schedule.shortest
    assert schedule.length(end) == schedule.length(end + 10**9) == schedule.longest


@given(schedules)
def test_the_length_never_decreases(schedule: LengthSchedule) -> None:
    end = schedule.warmup + schedule.growth
    steps = range(0, end + 2, max(1, end // 300))
    assert all(a <= b for a, b in pairwise(map(schedule.length, steps)))


def test_quadratic_is_the_square_and_geometric_doubles() -> None:
    square = LengthSchedule(shortest=128, longest=1024, warmup=10_000, growth=50_000, kind="quadratic")
    assert square.length(10_000 + 25_000) == 128 + (1024 - 128) // 4
    doubling = LengthSchedule(shortest=128, longest=1024, growth=300, kind="geometric")
    assert [doubling.length(step) for step in (0, 100, 200, 300)] == [128, 256, 512, 1024]


def test_whole_numbers_are_not_off_by_one() -> None:
    """0.57 * 100 is 56.99999999999999 in floating point."""
    assert LengthSchedule(shortest=1, longest=101, growth=100).length(57) == 58
    assert LengthSchedule(shortest=100, longest=200, growth=2, kind="cosine").length(1) == 150


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shortest": 0}, "shortest=0"),
        ({"shortest": 20}, "longest=10"),
        ({"growth": -1}, "growth=-1"),
        ({"warmup": -1}, "warmup=-1"),
        ({"kind": "cubic"}, "'cubic'|'geometric'"),
    ],
)
def test_invalid_arguments_raise(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthSchedule(**({"shortest": 5, "longest": 10, "growth": 3} | wrong))


class Rows(pl.LightningDataModule):
    """96 rows in batches of the given length."""

    length: int | None = None

    def set_length(self, length: int) -> None:
        self.length = length

    def train_dataloader(self) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(torch.zeros(96, 1), batch_size=self.length)


class Recorder(pl.LightningModule):
    """Writes down the length at every step, and saves a checkpoint after some step."""

    def __init__(self, save: Path | None = None, after: int = -1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: dict[int, int] = {}
        self.save_to, self.after = save, after

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        assert len(batch) in (self.trainer.datamodule.length, 96 % self.trainer.datamodule.length)
        self.seen[self.global_step] = self.trainer.datamodule.length
        return (batch * self.weight).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.after:
            self.trainer.save_checkpoint(self.save_to)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(recorder: Recorder, checkpoint: Path | None = None) -> dict[int, int]:
    data = Rows()
    schedule = LengthSchedule(shortest=8, longest=32, warmup=10, growth=20)
    trainer = pl.Trainer(
        max_epochs=5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[LengthCurriculum(schedule, data.set_length)],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")
        warnings.filterwarnings("ignore", ".*checkpoint that ended before the epoch ended")
        trainer.fit(recorder, data, ckpt_path=checkpoint, weights_only=True)
    return recorder.seen


# Epochs begin at steps 0, 12, 22, 27 and 31; the length of an epoch is that of its first step.
@pytest.mark.parametrize("after", [5, 12, 17, 22, 26])
def test_a_resumed_training_has_the_same_lengths(tmp_path: Path, after: int) -> None:
    whole = fit(Recorder(tmp_path / "state.ckpt", after))
    assert list(whole.values()) == [8] * 12 + [10] * 10 + [22] * 5 + [28] * 4 + [32] * 3
    resumed = fit(Recorder(), tmp_path / "state.ckpt")
    assert resumed == {step: length for step, length in whole.items() if step >= after}


def test_without_growth_it_jumps_after_the_warmup():
    schedule = LengthSchedule(shortest=2, longest=9, warmup=3, growth=0)
    assert [schedule.length(step) for step in range(5)] == [2, 2, 2, 9, 9]
