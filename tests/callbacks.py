"""Callbacks of trainings that several tests use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

if TYPE_CHECKING:
    from collections.abc import Callable

    from alphastomics.data import Batch
    from alphastomics.train import TrainingPlan


class Stop(pl.Callback):
    """An orderly end after some steps of a training that was meant to be longer."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


class AtStep(pl.Callback):
    """Something that happens before a step."""

    def __init__(self, step: int, act: Callable[[pl.Trainer, TrainingPlan], None]) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: pl.Trainer, plan: TrainingPlan, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act(trainer, plan)


class Watch(pl.Callback):
    """Step, epoch, longest context, cells and progress of every batch, and the number of cells by step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int, frozenset[int], float]] = []
        self.counts: dict[int, int] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, plan: TrainingPlan, batch: Batch, batch_idx: int) -> None:
        cells = frozenset(batch.rows[batch.mask].tolist())
        longest = int(batch.mask.sum(1).max())
        self.counts[trainer.global_step] = int(batch.mask.sum())
        self.seen.append((trainer.global_step, trainer.current_epoch, longest, cells, plan.progress()))

    def of_epochs(self) -> dict[int, list[tuple[int, int, frozenset[int], float]]]:
        """The same by epoch."""
        epochs: dict[int, list] = {}
        for step, epoch, longest, cells, progress in self.seen:
            epochs.setdefault(epoch, []).append((step, longest, cells, progress))
        return epochs
