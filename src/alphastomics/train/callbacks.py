"""Callbacks: actions after an optimizer step, means over an epoch, history, metrics file, throughput and memory, and micro-batches."""

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
from alphastomics.train.distributed.processes import gather_objects, sum_over_processes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from alphastomics.data import Batch
    from alphastomics.train.datamodule import ContextDataModule

GIB = 2**30
STATUS = Path("/proc/self/status")


class OptimizerStepCallback(pl.Callback):
    """Calls :meth:`on_optimizer_step` after each step of the optimizer, which may need several batches."""

    _step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count from the step of the checkpoint."""
        super().on_train_start(trainer, pl_module)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Do nothing while gradients are still being accumulated."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self.on_optimizer_step(trainer, pl_module)

    def on_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Act after a step."""
        raise NotImplementedError


class EpochMeans(pl.Callback):
    """Logs the epoch means of the values that :meth:`TrainingPlan.training_step` returns; the first callback in the list.

    The sums are stored in checkpoints. Lightning's own means restart when a training is resumed within an epoch.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}  # name -> sum over contexts, a tensor on the device of training
        self._counts: dict[str, int] = {}  # name -> number of contexts

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Add the values of a batch."""
        for name, value in outputs["values"].items():
            self._sums[name] = self._sums.get(name, 0.0) + value * outputs["n_contexts"]
            self._counts[name] = self._counts.get(name, 0) + outputs["n_contexts"]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the means over all processes and reset the sums."""
        if self._sums:
            sums = torch.stack([torch.as_tensor(value, device=pl_module.device) for value in self._sums.values()])
            counts = torch.tensor(list(self._counts.values()), device=pl_module.device)
            means = sum_over_processes(trainer, sums) / sum_over_processes(trainer, counts)
            # All processes have the same value, and a maximum does not round.
            pl_module.log_dict(
                dict(zip(self._sums, means.unbind(), strict=True)),
                on_step=False,
                on_epoch=True,
                reduce_fx="max",
                sync_dist=True,
            )
        self._sums, self._counts = {}, {}

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the sums of every process."""
        local = {name: [float(value), float(self._counts[name])] for name, value in self._sums.items()}
        checkpoint["epoch_sums"] = gather_objects(trainer, local)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the sums of this process, unless the number of processes has changed."""
        stored = checkpoint.get("epoch_sums", [])
        local = stored[trainer.global_rank] if len(stored) == trainer.world_size else {}
        self._sums = {name: torch.tensor(value) for name, (value, _) in local.items()}
        self._counts = {name: int(count) for name, (_, count) in local.items()}


class History(pl.Callback):
    """Collects the epoch values of training and validation.

    Parameters
    ----------
    before
        Tables of earlier trainings of the model; new epochs are appended to them.
    """

    def __init__(self, before: Mapping[str, pd.DataFrame] | None = None) -> None:
        self.before = dict(before or {})
        self.offset = max((int(table.index[-1]) + 1 for table in self.before.values() if len(table)), default=0)
        self.values: dict[str, dict[int, float]] = {}
        self._validated = -1  # last epoch of a validation

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that this epoch has validation losses."""
        self._validated = trainer.current_epoch

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Store the values that were logged in this epoch."""
        # Lightning keeps the last values of what is not computed in every epoch.
        epochs = {LAYER: getattr(pl_module, "statistics_epoch", None), "validation_": self._validated}
        stale = tuple(prefix for prefix, epoch in epochs.items() if epoch != trainer.current_epoch)
        for name, value in trainer.callback_metrics.items():
            if name.startswith(("train_", "validation_")) and not name.startswith(stale):
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
        """Restore the values of a checkpoint."""
        self.values, self.offset = state_dict["values"], state_dict["offset"]


class MetricsFile(pl.Callback):
    """Writes the history as CSV, one row per epoch, every ten seconds and when training ends or fails.

    Parameters
    ----------
    path
        The file; replaced atomically.
    """

    SECONDS = 10.0

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._written: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start measuring time."""
        self._written = time.monotonic()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write if ten seconds have passed; at the end of an epoch, the history may not have its values yet."""
        if self._written is not None and time.monotonic() - self._written >= self.SECONDS:
            self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the complete history."""
        self._write(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the history, unless training has not begun."""
        if self._written is not None:
            with suppress(OSError):  # it would hide the exception
                self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        history = next(c for c in trainer.callbacks if isinstance(c, History))  # type: ignore[attr-defined]
        tables = history.tables()
        if not trainer.is_global_zero or not tables:
            return
        with replacing(self.path) as temporary:
            pd.concat(tables.values(), axis=1).sort_index().to_csv(temporary)
        self._written = time.monotonic()


class ThroughputMonitor(pl.Callback):
    """Logs ``cells_per_second`` of all processes together and ``memory_gib``, at the first step and then every second.

    Time is measured from the end of one step to the end of the next; it includes waiting for data and excludes validation.
    Cells are counted in one group of processes and multiplied by the number of groups.
    """

    SECONDS = 1.0

    def __init__(self) -> None:
        self._seconds, self._since = 0.0, 0.0
        self._cells: torch.Tensor | int = 0
        self._has_logged = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start measuring."""
        self._since = time.perf_counter()

    on_validation_end = on_train_epoch_start

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reset the counts; an epoch that is resumed does not call on_train_epoch_start."""
        self._seconds, self._cells, self._has_logged = 0.0, 0, False
        self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        """Count the cells of a batch, and log if a second has passed."""
        if trainer.progress_bar_callback is None and not trainer.loggers:
            return
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now
        self._cells = self._cells + batch.mask.sum()  # stays on the device, without synchronization
        if self._has_logged and self._seconds < self.SECONDS:
            return
        n_groups = trainer.world_size // pl_module.group_size  # type: ignore[operator]
        rate = float(self._cells) * n_groups / self._seconds
        found = {"cells_per_second": rate, "memory_gib": peak_memory(pl_module.device) / GIB}
        pl_module.log_dict(found, prog_bar=True, on_step=True, on_epoch=False)
        self._seconds, self._cells, self._has_logged = 0.0, 0, True


def peak_memory(device: torch.device) -> float:
    """Peak memory in bytes: reserved by PyTorch on a GPU, else used by this process; NaN if not reported by the system."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    if STATUS.exists():  # `getrusage` may report the parent process
        lines = STATUS.read_text().splitlines()
        return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), float("nan"))
    try:
        import resource
    except ImportError:
        return float("nan")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes, outside of Linux


class MicroBatches(pl.Callback):
    """Sets gradient accumulation to the number of micro-batches in a batch, which changes with the length of contexts.

    The trainer's argument ``accumulate_grad_batches`` then counts whole batches.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Store the argument ``accumulate_grad_batches``."""
        self._accumulation = trainer.accumulate_grad_batches

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Multiply it by the number of micro-batches."""
        datamodule: ContextDataModule = trainer.datamodule  # type: ignore[attr-defined]
        trainer.accumulate_grad_batches = self._accumulation * datamodule.batches_per_step

    # An epoch that is resumed does not call on_train_epoch_start.
    on_train_start = on_train_epoch_start = on_fit_start
