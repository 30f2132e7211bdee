"""Progress bar of a training: the share that is done, the time that is left, and a smoothed loss."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ProgressBar
from scvi import settings
from tqdm.auto import tqdm

if TYPE_CHECKING:
    import lightning.pytorch as pl

SECONDS = 0.2  # between updates
SMOOTHING = 0.02  # weight of a step: losses of different kinds of contexts alternate
FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"


class TrainingProgress(ProgressBar):
    """One bar for the whole training, by steps or by time, in the first process.

    It is hidden if ``scvi.settings.verbosity`` hides messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self._bar: tqdm[Any] | None = None
        self._loss: torch.Tensor | None = None
        self._updated = 0.0
        self._enabled = True

    def disable(self) -> None:
        """Hide the bar, as Lightning does in processes other than the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show the bar."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the bar."""
        hidden = not self._enabled or settings.verbosity > logging.INFO
        self._bar = tqdm(total=1.0, desc="Training", bar_format=FORMAT, disable=hidden)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Smooth the loss, and update the bar a few times a second, so that a device need not wait."""
        loss = trainer.callback_metrics["loss"].detach().float()
        self._loss = loss if self._loss is None else torch.lerp(self._loss, loss.to(self._loss), SMOOTHING)
        if time.monotonic() - self._updated >= SECONDS:
            self._show(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Close the bar at its last value."""
        self._show(trainer, pl_module)
        self._close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Close the bar."""
        self._close()

    def _show(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._updated = time.monotonic()
        if self._bar is None or self._bar.disable or self._loss is None:
            return
        values = {name: float(value) for name, value in trainer.progress_bar_metrics.items()}
        shown = [f"loss {float(self._loss):.3f}"]
        if "cells_per_second" in values:
            shown += [f"{values['cells_per_second']:,.0f} cells/s", f"{values['memory_gib']:.1f} GiB"]
        self._bar.n = pl_module.done
        self._bar.set_postfix_str(", ".join(shown))

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
