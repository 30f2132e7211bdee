"""Sums behind the means of an epoch, which a checkpoint in its midst must hold: Lightning begins them anew when it resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from alphastomics.train.processes import collected

if TYPE_CHECKING:
    import lightning.pytorch as pl

Sums = dict[str, list[float]]  # name -> sum of the values, and of their weights
STEP = "training_step"


class EpochSums:
    """What a process has added up of every value that is logged for an epoch of training."""

    def __init__(self) -> None:
        self._kept: Sums = {}

    @staticmethod
    def of(trainer: pl.Trainer) -> list[Sums]:
        """Those of every process; empty at the end of an epoch, after which they begin anew."""
        own: Sums = {}
        progress: Any = trainer.fit_loop.epoch_progress.current
        if progress.ready > progress.processed and not trainer.is_last_batch:
            own = {
                metric.meta.name: [float(metric.value), float(metric.cumulated_batch_size)]
                for metric in trainer.fit_loop.epoch_loop._results.values()
                if metric.meta.fx == STEP and metric.meta.on_epoch and not metric.has_reset
            }
        return collected(trainer, own)

    def bring(self, kept: list[Sums], trainer: pl.Trainer) -> None:
        """Take those of a checkpoint for the rest of its epoch; nothing where there were other processes."""
        self._kept = kept[trainer.global_rank] if len(kept) == trainer.world_size else {}

    def take_up(self, plan: pl.LightningModule) -> None:
        """Add them to what the first step has logged."""
        if not self._kept:
            return
        results = plan.trainer.fit_loop.epoch_loop._results
        found = {metric.meta.name for metric in results.values() if metric.meta.fx == STEP and not metric.has_reset}
        zeros = {name: torch.zeros((), device=plan.device) for name in self._kept if name not in found}
        plan.log_dict(zeros, on_step=False, on_epoch=True, batch_size=0, sync_dist=True)
        for name, (value, weight) in self._kept.items():
            metric = results[f"{STEP}.{name}"]
            metric.value = metric.value + value
            metric.cumulated_batch_size = metric.cumulated_batch_size + int(weight)
        self._kept = {}
