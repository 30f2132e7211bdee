"""Interrupting a training run by Ctrl-C, SIGTERM or a time limit: all processes stop after the same optimizer step."""

from __future__ import annotations

import logging
import signal
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.trainer.states import RunningStage

from alphastomics.train.callbacks import OptimizerStepCallback
from alphastomics.train.distributed.processes import gather_objects

if TYPE_CHECKING:
    from types import FrameType

    import lightning.pytorch as pl

logger = logging.getLogger(__name__)


class SignalLatch:
    """Records a signal in ``received`` (0 for none) and restores the default handler, which acts on the next signal."""

    def __init__(self) -> None:
        self.received = 0

    def arm(self, *signals: int) -> None:
        """Record these signals from now on; does nothing outside of the main thread."""
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                signal.signal(number, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self.received = number


class SynchronizedStop(OptimizerStepCallback):
    """Stops all processes after the step in which one of them received Ctrl-C or SIGTERM.

    Slurm and Kubernetes send SIGTERM before they kill a job. Lightning's own handler communicates within a step, where it can
    collide with other communication. Lightning handles Ctrl-C in a single process. The runner restores the handlers.
    ``ended_by`` is the signal that ended the training; 0 for none.
    """

    def __init__(self) -> None:
        self._latch = SignalLatch()
        self.ended_by = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record signals from now on."""
        super().on_train_start(trainer, pl_module)
        self._latch.arm(signal.SIGTERM, *([signal.SIGINT] if trainer.world_size > 1 else []))

    def on_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop if any process received a signal."""
        if not trainer.strategy.reduce_boolean_decision(bool(self._latch.received), all=False):
            return
        self.ended_by, trainer.should_stop = max(gather_objects(trainer, self._latch.received)), True
        if trainer.is_global_zero:
            event = "ended by SIGTERM" if self.ended_by == signal.SIGTERM else "interrupted"
            logger.warning("Training was %s at step %d; the model keeps its weights.", event, self._step)


class TimeLimit(OptimizerStepCallback, Timer):
    """Stops the training after ``seconds``, which include the time before it was resumed.

    It stops after a step of the optimizer, because accumulated gradients would be lost.

    Parameters
    ----------
    seconds
        The limit.
    used
        Part of it that was used before this training; a resumed training has that of its first start.
    """

    def __init__(self, seconds: float, *, used: float = 0.0) -> None:
        super().__init__(duration=timedelta(seconds=seconds), interval="step", verbose=False)
        self.seconds = seconds
        self.load_state_dict({"time_elapsed": {RunningStage.TRAINING.value: used}})

    def on_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the time."""
        Timer.on_train_batch_end(self, trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log that the time ended the training, and how to continue."""
        if self.time_elapsed() >= self.seconds and trainer.is_global_zero:
            logger.info(
                "Training reached its time limit of %g seconds at step %d. Pass resume= and a larger max_time= to continue.",
                self.seconds, trainer.global_step,
            )  # fmt: skip


class LatchedEarlyStopping(EarlyStopping):
    """Early stopping that stops a resumed training at once if it had stopped before, unless its patience is increased."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state except for the patience."""
        super().load_state_dict(state_dict | {"patience": self.patience})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop again if the patience is still exhausted."""
        trainer.should_stop = trainer.should_stop or self.wait_count >= max(1, self.patience)
