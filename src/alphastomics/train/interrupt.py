"""Ctrl-C where several processes train: all of them end after the same step, and what they learned is kept."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

if TYPE_CHECKING:
    from types import FrameType

logger = logging.getLogger(__name__)


class Patience:
    """Notes the first Ctrl-C; a second one does not wait."""

    def __init__(self) -> None:
        self.asked = False

    def begin(self) -> None:
        """From now on; only the main thread may say so."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.asked = True


class StopTogether(pl.Callback):
    """Ends the training of several processes after the step in which one of them was interrupted.

    The runner restores the signal.
    """

    def __init__(self) -> None:
        self._patience = Patience()
        self._step = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for Ctrl-C, where there are several processes."""
        self._step = trainer.global_step
        if trainer.world_size > 1:
            self._patience.begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask all processes, after a step of the optimiser."""
        if trainer.world_size == 1 or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        if trainer.strategy.reduce_boolean_decision(self._patience.asked, all=False):
            trainer.should_stop = True
            if trainer.is_global_zero:
                logger.warning("Training was interrupted at step %d; the model keeps its weights.", self._step)
