"""The trainer, Lightning's with the callbacks of this package, and the runner, which stores the results in the model."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
from scvi import settings
from scvi.train import TrainRunner

from alphastomics.config import TrainerConfig
from alphastomics.train._lightning_compat import replace_script_launcher
from alphastomics.train.callbacks import EpochMeans, History, ThroughputMonitor
from alphastomics.train.distributed.launch import (
    REMEDY,
    DeadProcessError,
    ProcessWatchdog,
    WatchedScriptLauncher,
    is_connection_error,
)
from alphastomics.train.ema import BestAverage, MovingAverage, finish_averages
from alphastomics.train.interrupt import LatchedEarlyStopping, SynchronizedStop, TimeLimit
from alphastomics.train.optimization import NonFiniteLossError
from alphastomics.train.progress import TrainingProgress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from alphastomics.train.checkpoint import LastCheckpoint
    from alphastomics.train.plan import TrainingPlan

logger = logging.getLogger(__name__)

Found = TypeVar("Found", bound=pl.Callback)

# Warnings that do not apply here.
_IGNORED_WARNINGS = (
    ".*returned a view tensor.*",  # from FSDP2: the output of the network is never modified in place
    ".*does not have many workers.*",  # threads cut contexts while the network works
    "Total length of `list` across ranks is zero.*",
    ".*number of training batches.*smaller than the logging interval.*",
    ".*treespec, LeafSpec.* is deprecated",  # from Lightning on recent versions of PyTorch
    ".*resuming from a checkpoint that ended before the epoch ended.*",  # the data module resumes there
)


def seconds_of(max_time: str | timedelta | dict[str, float] | float | None) -> float | None:
    """Seconds of a ``max_time`` as Lightning accepts it ("DD:HH:MM:SS", timedelta or its arguments), or in seconds.

    Parameters
    ----------
    max_time
        The time; None: no limit.

    Raises
    ------
    ValueError
        If the time is not positive and finite, or the string has another format.
    """
    if max_time is None:
        return None
    if isinstance(max_time, str):
        parts = max_time.split(":")
        if len(parts) != 4 or not all(part.strip().isdigit() for part in parts):
            raise ValueError(f'max_time={max_time!r} does not have the format "DD:HH:MM:SS"; pass seconds as a number')
        max_time = timedelta(**dict(zip(("days", "hours", "minutes", "seconds"), map(int, parts), strict=True)))
    if isinstance(max_time, dict):
        max_time = timedelta(**max_time)
    seconds = max_time.total_seconds() if isinstance(max_time, timedelta) else float(max_time)
    if not 0 < seconds < timedelta.max.total_seconds():
        raise ValueError(f"max_time must be positive and finite, got {max_time}; pass None for no limit")
    return seconds


class ContextTrainer(pl.Trainer):
    """Lightning's trainer with the arguments that scvi-tools passes.

    The trainer of scvi-tools does not allow early stopping with several processes, and its checkpoint callback fails there.

    Parameters
    ----------
    ema
        Callback of the moving average of the weights.
    history
        Callback that collects the logged values.
    max_seconds
        Longest time of training; None: no limit.
    used_seconds
        Part of it that was used before.
    checkpoint
        Callback that writes checkpoints; None: none are written.
    early_stopping, early_stopping_monitor, early_stopping_patience, early_stopping_min_delta
        As in scvi-tools; the model gets the best weights, see :class:`~alphastomics.train.ema.BestAverage`.
    callbacks
        Further callbacks.
    **kwargs
        Passed to :class:`lightning.pytorch.Trainer`.
    """

    def __init__(
        self,
        *,
        ema: MovingAverage,
        history: History,
        max_seconds: float | None = None,
        used_seconds: float = 0.0,
        checkpoint: LastCheckpoint | None = None,
        early_stopping: bool = False,
        early_stopping_monitor: str = "validation_loss",
        early_stopping_patience: int = 45,
        early_stopping_min_delta: float = 0.0,
        callbacks: list[pl.Callback] | None = None,
        **kwargs: Any,
    ) -> None:
        callbacks = [EpochMeans(), *(callbacks or []), ema, history, ThroughputMonitor(), SynchronizedStop()]
        if max_seconds is not None:
            callbacks.append(TimeLimit(max_seconds, used=used_seconds))
        if early_stopping:
            stop = LatchedEarlyStopping(
                monitor=early_stopping_monitor, patience=early_stopping_patience, min_delta=early_stopping_min_delta
            )
            callbacks += [stop, BestAverage(ema, early_stopping_monitor)]
        if kwargs.get("enable_progress_bar", True) and not any(
            isinstance(c, pl.callbacks.ProgressBar) for c in callbacks
        ):
            callbacks.append(TrainingProgress())
        if checkpoint is not None:
            callbacks.append(checkpoint)
        defaults: dict[str, Any] = {
            "gradient_clip_val": TrainerConfig.gradient_clip_val,
            "logger": False,
            "enable_checkpointing": checkpoint is not None,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "use_distributed_sampler": False,  # loaders divide the contexts among the processes
            "default_root_dir": settings.logging_dir,
        }
        super().__init__(callbacks=callbacks, **(defaults | kwargs))
        replace_script_launcher(self.strategy, WatchedScriptLauncher)

    def __getstate__(self) -> dict[str, Any]:
        """State for a spawned process, without the model, which scvi-tools stores in the trainer."""
        return {name: value for name, value in self.__dict__.items() if name != "_model"}


class ContextRunner(TrainRunner):
    """Runs the trainer, and stores weights, history and trainer in the model.

    The model keeps its last finite weights in any case, and counts as trained after the first step. Ctrl-C ends the training
    without an error. Errors are raised. SIGTERM ends the script.
    """

    _trainer_cls = ContextTrainer

    def __call__(self) -> None:
        """Run training.

        Raises
        ------
        DeadProcessError
            If another process of the training has died.
        SystemExit
            If the training was ended by SIGTERM; the status is 128 plus the number of the signal, as in shells.
        """
        collective = True  # whether all processes reach _finish
        try:
            with _restored_signals():
                self._fit()
        except SystemExit:  # raised by Lightning after Ctrl-C
            collective = False
            logger.warning(
                "Training was interrupted at step %d; the model keeps its weights.", self.trainer.global_step
            )
        except NonFiniteLossError:  # raised in all processes
            raise
        except BaseException as error:
            collective = False
            if isinstance(error, DeadProcessError) or self.trainer.world_size == 1 or not is_connection_error(error):
                raise
            raise DeadProcessError(f"Another process of the training cannot be reached; {REMEDY}") from error
        finally:
            self._finish(collective=collective)
        if self._callback(SynchronizedStop).ended_by == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)

    def _fit(self) -> None:
        several = self.trainer.num_devices * self.trainer.num_nodes > 1
        with warnings.catch_warnings(), ProcessWatchdog() if several else nullcontext():
            for message in _IGNORED_WARNINGS:
                warnings.filterwarnings("ignore", message)
            # weights_only=True: unpickling a checkpoint cannot run code.
            self.trainer.fit(self.training_plan, self.data_splitter, ckpt_path=self.ckpt_path, weights_only=True)

    def _finish(self, *, collective: bool) -> None:
        """Store the best or averaged weights, the history and the trainer in the model."""
        plan: TrainingPlan = self.training_plan
        finish_averages(self.trainer, plan)
        plan.unshard(collective=collective)
        self.model.history_ = self._callback(History).tables()
        self.model.module.eval()
        self.model.is_trained_ = self.model.is_trained_ or self.trainer.global_step > 0
        self.model.to_device(self.device)
        self.model.trainer = self.trainer

    def _callback(self, kind: type[Found]) -> Found:
        return next(callback for callback in self.trainer.callbacks if isinstance(callback, kind))


@contextmanager
def _restored_signals() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which the trainer and its callbacks replace."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # None: set outside of Python, which cannot restore it
                    signal.signal(number, handler)
