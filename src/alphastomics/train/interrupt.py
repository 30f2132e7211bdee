"""A training that is asked to end: by Ctrl-C, by SIGTERM, by the clock. It ends after a step, in all processes after the same."""

from __future__ import annotations

import logging
import signal
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer

from alphastomics.train.distributed.processes import gather_objects

if TYPE_CHECKING:
    from types import FrameType

logger = logging.getLogger(__name__)


class SignalLatch:
    """Notes the first of some signals; a second one does not wait.

    Attributes
    ----------
    asked
        The signal that came; 0 for none.
    """

    def __init__(self) -> None:
        self.asked = 0

    def begin(self, *signals: int) -> None:
        """From now on; only the main thread may say so."""
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self.asked = number


class SynchronizedStop(pl.Callback):
    """Ends the training after the step in which one of its processes was interrupted, or asked to end by SIGTERM.

    Ctrl-C in a single process is Lightning's. SIGTERM is what Slurm and Kubernetes send before they kill: Lightning would tell
    the other processes in the midst of a step, in which they may tell each other something else. The runner restores the signals.

    Attributes
    ----------
    ended_by
        The signal that ended the training; 0 for none.
    """

    def __init__(self) -> None:
        self._patience = SignalLatch()
        self._step = self.ended_by = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for signals."""
        self._step = trainer.global_step
        self._patience.begin(signal.SIGTERM, *([signal.SIGINT] if trainer.world_size > 1 else []))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ask all processes, after a step of the optimizer."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        asked = max(gather_objects(trainer, self._patience.asked)) if self._any(trainer) else 0
        if asked:
            self.ended_by, trainer.should_stop = asked, True
            if trainer.is_global_zero:
                how = "asked to end (SIGTERM)" if asked == signal.SIGTERM else "interrupted"
                logger.warning("Training was %s at step %d; the model keeps its weights.", how, self._step)

    def _any(self, trainer: pl.Trainer) -> bool:
        return bool(trainer.strategy.reduce_boolean_decision(bool(self._patience.asked), all=False))


class TimeLimit(Timer):
    """Ends the training after a time, which counts from its beginning, resumed or not.

    Between two steps of the optimizer: gradients of a part of a step would be lost.

    Parameters
    ----------
    seconds
        The time.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(duration=timedelta(seconds=seconds), interval="step", verbose=False)
        self.seconds, self._step = seconds, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        super().on_train_start(trainer, pl_module)
        self._step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Look at the clock, after a step of the optimizer."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            super().on_train_batch_end(trainer, *args, **kwargs)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say that it was the clock, and what goes on."""
        if self.time_elapsed() >= self.seconds and trainer.is_global_zero:
            logger.info(
                "Training ended at step %d: max_time=%g seconds are over. A longer max_time= and resume= go on from its checkpoint.",
                trainer.global_step, self.seconds,
            )  # fmt: skip


class LatchedEarlyStopping(EarlyStopping):
    """Early stopping that, resumed after it has stopped, trains on only if it is given more patience."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up how long it has waited."""
        super().load_state_dict(state_dict | {"patience": self.patience})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember having stopped."""
        trainer.should_stop = trainer.should_stop or self.wait_count >= max(1, self.patience)
