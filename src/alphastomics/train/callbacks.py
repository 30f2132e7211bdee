"""Sums behind the means of an epoch, which a checkpoint in its midst must hold: Lightning begins them anew when it resumes.

What was logged at the end of each epoch, as the DataFrames that scvi-tools users expect, under any logger.

How fast a training is and what it holds: cells per second and GiB, in the progress bar and in loggers.

A batch that a device takes in parts: gradients are accumulated over the parts before a step of the optimizer.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pandas as pd
import torch

from alphastomics._io._atomic import replacing
from alphastomics.train.diagnostics import LAYER
from alphastomics.train.distributed.processes import gather_objects

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from alphastomics.data import Batch
    from alphastomics.train.datamodule import ContextDataModule

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
        return gather_objects(trainer, own)

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


class History(pl.Callback):
    """Collects the epoch values of training and validation.

    Parameters
    ----------
    before
        History of earlier training, which this one continues.
    """

    def __init__(self, before: Mapping[str, pd.DataFrame] | None = None) -> None:
        self.before = dict(before or {})
        self.offset = max((int(table.index[-1]) + 1 for table in self.before.values() if len(table)), default=0)
        self.values: dict[str, dict[int, float]] = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take what this epoch logged."""
        # Layers are not looked at in every epoch, and Lightning goes on showing what was seen last.
        stale = getattr(pl_module, "last_look", None) != trainer.current_epoch
        for name, value in trainer.callback_metrics.items():
            if name.startswith(("train_", "validation_")) and not (stale and name.startswith(LAYER)):
                self.values.setdefault(name, {})[self.offset + trainer.current_epoch] = float(value)

    def tables(self) -> dict[str, pd.DataFrame]:
        """One table per logged name: index ``epoch``, one column of that name."""
        tables: dict[str, pd.DataFrame] = dict(self.before)
        for name, values in self.values.items():
            new = pd.DataFrame({name: pd.Series(values, dtype=float)}).rename_axis("epoch")
            tables[name] = pd.concat([self.before[name], new]) if name in self.before else new
        return tables

    def state_dict(self) -> dict[str, Any]:
        """Values so far, for a checkpoint."""
        return {"values": self.values, "offset": self.offset}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the values of a checkpoint."""
        self.values, self.offset = state_dict["values"], state_dict["offset"]


class MetricsFile(pl.Callback):
    """Writes what was logged so far as CSV, one row for each epoch: every ten seconds, and when training ends in any way.

    Parameters
    ----------
    path
        The file; written under a temporary name and renamed.
    """

    SECONDS = 10.0

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._written: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._written = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write when it is due."""
        if self._written is not None and time.monotonic() - self._written >= self.SECONDS:
            self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write all of it."""
        self._write(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write what there is, unless nothing has begun."""
        if self._written is not None:
            with suppress(OSError):  # what is told is the exception
                self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        history = next(c for c in trainer.callbacks if isinstance(c, History))  # type: ignore[attr-defined]
        tables = history.tables()
        if not trainer.is_global_zero or not tables:
            return
        with replacing(self.path) as temporary:
            pd.concat(tables.values(), axis=1).sort_index().to_csv(temporary)
        self._written = time.monotonic()


GIB = 2**30
STATUS = Path("/proc/self/status")


class ThroughputMonitor(pl.Callback):
    """Logs ``cells_per_second``, of all processes together, and ``memory_gib``, at the first step and then every second.

    Time is counted from the end of one step to the end of the next, what was waited for cells included and validation left
    out. Every group of processes that share contexts counts its own cells; all have nearly as many.
    """

    SECONDS = 1.0

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, 0.0
        self._cells: torch.Tensor | int = 0
        self._told = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let the clock run."""
        self._since = time.perf_counter()

    on_validation_end = on_train_epoch_start

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to count; an epoch that is resumed in its midst does not start."""
        self._seconds, self._cells, self._told = 0.0, 0, False
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Count the cells of a batch, and log what is due."""
        if trainer.progress_bar_callback is None and not trainer.loggers:
            return
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now
        self._cells = self._cells + batch.mask.sum()  # left on the device, which need not wait for it
        if self._told and self._seconds < self.SECONDS:
            return
        n_groups = trainer.world_size // pl_module.context_parallel_size  # type: ignore[operator]
        rate = float(self._cells) * n_groups / self._seconds
        found = {"cells_per_second": rate, "memory_gib": peak_memory(pl_module.device) / GIB}
        pl_module.log_dict(found, prog_bar=True, on_step=True, on_epoch=False)
        self._seconds, self._cells, self._told = 0.0, 0, True


def peak_memory(device: torch.device) -> float:
    """Most bytes so far: what PyTorch held on a GPU, elsewhere what this process held; NaN where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    if STATUS.exists():  # what `getrusage` says may be of the process that started this one
        lines = STATUS.read_text().splitlines()
        return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), float("nan"))
    try:
        import resource
    except ImportError:
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes, outside of Linux


class MicroBatches(pl.Callback):
    """Lets Lightning accumulate as many batches as the data module makes of one, also where contexts change in length.

    ``accumulate_grad_batches`` of the trainer then counts whole batches.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remember how many batches are asked for."""
        self._asked = trainer.accumulate_grad_batches

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count parts."""
        datamodule: ContextDataModule = trainer.datamodule  # type: ignore[attr-defined]
        trainer.accumulate_grad_batches = self._asked * datamodule.batches_per_step

    # An epoch that is resumed in its midst does not begin.
    on_train_start = on_train_epoch_start = on_fit_start
