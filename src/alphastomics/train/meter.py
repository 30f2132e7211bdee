"""How fast a training is and what it holds: cells per second and GiB, in the progress bar and in loggers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

if TYPE_CHECKING:
    from alphastomics.data import Batch

GIB = 2**30
STATUS = Path("/proc/self/status")


class Meter(pl.Callback):
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
