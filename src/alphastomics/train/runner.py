"""How training is run: a Lightning trainer with our callbacks, and what is left when it ends, also when it ends badly."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from scvi import settings
from scvi.train import TrainRunner

from alphastomics.train.callbacks import EpochMeans, History, ThroughputMonitor
from alphastomics.train.defaults import GRADIENT_NORM
from alphastomics.train.distributed.launch import (
    REMEDY,
    DeadProcessError,
    ProcessWatchdog,
    ScriptLauncher,
    is_connection_error,
)
from alphastomics.train.ema import BestAverage, MovingAverage
from alphastomics.train.interrupt import LatchedEarlyStopping, SynchronizedStop, TimeLimit
from alphastomics.train.optimization import NonFiniteLossError

if TYPE_CHECKING:
    from alphastomics.train.checkpoint import LastCheckpoint
    from alphastomics.train.plan import TrainingPlan

logger = logging.getLogger(__name__)

Found = TypeVar("Found", bound=pl.Callback)

# Lightning's advice to use more loader workers: threads cut contexts while the network works.
_ADVICE = (
    # FSDP2, of what would happen if something wrote into the output of a network; nothing does.
    ".*returned a view tensor.*",
    ".*does not have many workers.*",
    "Total length of `list` across ranks is zero.*",
    ".*number of training batches.*smaller than the logging interval.*",
    # The data module itself begins where the checkpoint was made.
    ".*resuming from a checkpoint that ended before the epoch ended.*",
)


def seconds_of(max_time: str | timedelta | dict[str, float] | float | None) -> float | None:
    """Lightning's ``max_time`` ("DD:HH:MM:SS", timedelta or mapping), or plain seconds, as seconds."""
    if max_time is None:
        return None
    if isinstance(max_time, str):
        parts = max_time.split(":")
        if len(parts) != 4 or not all(part.strip().isdigit() for part in parts):
            raise ValueError(f'max_time={max_time!r} is not "DD:HH:MM:SS"; pass seconds as a number')
        max_time = timedelta(**dict(zip(("days", "hours", "minutes", "seconds"), map(int, parts), strict=True)))
    if isinstance(max_time, dict):
        max_time = timedelta(**max_time)
    seconds = max_time.total_seconds() if isinstance(max_time, timedelta) else float(max_time)
    if not seconds > 0:
        raise ValueError(f"max_time must be positive, got {max_time}")
    return seconds


class ContextTrainer(pl.Trainer):
    """Lightning's trainer with the arguments that scvi-tools passes.

    scvi-tools' own trainer is not used: its checkpoint callback fails with two processes and it forbids early
    stopping there.

    Parameters
    ----------
    plan_config
        Configuration of the plan (its ``ema_decay``).
    history
        Collector of logged values.
    max_seconds
        Longest time of training.
    checkpoint
        Where the state of training is kept, if anywhere.
    early_stopping, early_stopping_monitor, early_stopping_patience, early_stopping_min_delta
        As in scvi-tools; what is left are the best weights, see :class:`~alphastomics.train.ema.BestAverage`.
    **kwargs
        Passed to :class:`lightning.pytorch.Trainer`.
    """

    def __init__(
        self,
        *,
        ema: MovingAverage,
        history: History,
        max_seconds: float | None = None,
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
            callbacks.append(TimeLimit(max_seconds))
        if early_stopping:
            stop = LatchedEarlyStopping(
                monitor=early_stopping_monitor, patience=early_stopping_patience, min_delta=early_stopping_min_delta
            )
            callbacks += [stop, BestAverage(ema, early_stopping_monitor)]
        if kwargs.get("enable_progress_bar", True) and not any(
            isinstance(c, pl.callbacks.ProgressBar) for c in callbacks
        ):
            callbacks.append(TQDMProgressBar(refresh_rate=1))
        if checkpoint is not None:
            callbacks.append(checkpoint)
        defaults: dict[str, Any] = {
            "gradient_clip_val": GRADIENT_NORM,
            "logger": False,
            "enable_checkpointing": checkpoint is not None,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "use_distributed_sampler": False,  # loaders know their rank
            "default_root_dir": settings.logging_dir,
        }
        super().__init__(callbacks=callbacks, **(defaults | kwargs))
        launcher = self.strategy.launcher
        if type(launcher) is _SubprocessScriptLauncher:
            self.strategy._launcher = ScriptLauncher(
                launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
            )

    def __getstate__(self) -> dict[str, Any]:
        """What a spawned process gets: not the model, which scvi-tools puts here."""
        return {name: value for name, value in self.__dict__.items() if name != "_model"}


class ContextRunner(TrainRunner):
    """Runs the trainer and leaves a usable model behind.

    After an interrupt (Ctrl-C) the model keeps its last good weights and counts as trained; after an error it keeps
    them too, and the error is raised. After SIGTERM, too, and the script is ended.
    """

    _trainer_cls = ContextTrainer

    def __call__(self) -> None:
        """Run training.

        Raises
        ------
        DeadProcessError
            If another process of it has died.
        SystemExit
            If it was ended by SIGTERM, with the status that shells give it.
        """
        plan: TrainingPlan = self.training_plan
        ema = self._callback(MovingAverage)
        together = True  # whether all processes are here
        on_main_thread = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            several = self.trainer.num_devices * self.trainer.num_nodes > 1
            with warnings.catch_warnings(), ProcessWatchdog() if several else nullcontext():
                for message in _ADVICE:
                    warnings.filterwarnings("ignore", message)
                # Nothing of a checkpoint is unpickled but tensors and plain values.
                self.trainer.fit(plan, self.data_splitter, ckpt_path=self.ckpt_path, weights_only=True)
        except SystemExit:  # Lightning's end of a Ctrl-C, after which it leaves the signal ignored
            together = False
            logger.warning(
                "Training was interrupted at step %d; the model keeps its weights.", self.trainer.global_step
            )
        except NonFiniteLossError:  # in all processes alike
            raise
        except BaseException as error:
            together = False
            if isinstance(error, DeadProcessError) or self.trainer.world_size == 1 or not is_connection_error(error):
                raise
            raise DeadProcessError(f"Another process of the training cannot be reached; {REMEDY}") from error
        finally:
            if on_main_thread:
                for number, handler in handlers.items():
                    if handler is not None:  # what no Python code has set cannot be set by it
                        signal.signal(number, handler)
            ema.finish(plan)
            for best in self.trainer.callbacks:
                if isinstance(best, BestAverage):
                    best.finish(plan)
            plan.unshard(together=together)
            self.model.history_ = self._callback(History).tables()
            self.model.module.eval()
            self.model.is_trained_ = self.model.is_trained_ or self.trainer.global_step > 0
            self.model.to_device(self.device)
            self.model.trainer = self.trainer
        if self._callback(SynchronizedStop).ended_by == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)

    def _callback(self, kind: type[Found]) -> Found:
        return next(callback for callback in self.trainer.callbacks if isinstance(callback, kind))
