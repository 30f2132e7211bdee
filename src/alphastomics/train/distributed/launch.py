"""Processes of a training: their start, the results that they return, and the end of all if one dies.

If a process dies, the others get an error from gloo at once, but from NCCL after ten minutes or never. Each process therefore
runs a :class:`ProcessWatchdog`, which polls its parent and its children and ends the process after about 20 seconds.

A forked or spawned process has its own copies of weights, callbacks and counters. At its end, rank 0 returns the weights, as
in Lightning, the state of every callback, as in a checkpoint, and the progress of the loops.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from io import BytesIO
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from alphastomics.train._lightning_compat import (
    MultiProcessingDDPStrategy,
    MultiProcessingLauncher,
    ScriptLauncher,
)
from alphastomics.train.ema import finish_averages
from alphastomics.train.interrupt import SignalLatch
from alphastomics.train.optimization import NonFiniteLossError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
SECONDS = 1.0  # between two polls
GRACE = 20.0  # seconds in which a process can end by its own error
REMEDY = "its output is above; a training with a checkpoint continues with resume='last'"
LAUNCHER = "ALPHASTOMICS_LAUNCHER"  # environment variable: id of the process that started this one for a training
STATES = "alphastomics"  # key in Lightning's results
CONNECTION_WORDS = ("gloo", "connection closed by peer", "connection reset by peer", "nccl")

_children: list[subprocess.Popen[bytes]] = []  # processes of rank 1, 2, … that this process has started


class DeadProcessError(RuntimeError):
    """Another process of the training has died."""


def is_connection_error(error: BaseException) -> bool:
    """Whether an error means that another process cannot be reached."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in CONNECTION_WORDS)
    )


def death_message(process: str, end: int | str) -> str:
    """Message for a dead process, from its exit code (negative: a signal) or a phrase."""
    if isinstance(end, int):
        end = f"exit code {end}" if end >= 0 else signal.Signals(-end).name
    return f"{process} of the training ended by {end}; {REMEDY}"


class WatchedScriptLauncher(ScriptLauncher):
    """Starts the script once more for each further device; :class:`ProcessWatchdog` polls these processes."""

    def start_processes(self) -> None:
        """Start the processes, with the id of this process in their environment."""
        os.environ[LAUNCHER] = str(os.getpid())
        try:
            super().start_processes()
        finally:
            del os.environ[LAUNCHER]
        _children.extend(self.procs)


class ProcessWatchdog:
    """Context manager that ends this process about 20 seconds after its parent or one of its children has died.

    Parameters
    ----------
    parent
        Id of the parent; None: the process that started this one for a training, if any.
    """

    def __init__(self, parent: int | None = None) -> None:
        self.parent = int(os.environ.get(LAUNCHER, 0)) if parent is None else parent
        self._over = threading.Event()

    def __enter__(self) -> ProcessWatchdog:
        """Start polling."""
        threading.Thread(target=self._poll, name="watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop polling."""
        self._over.set()

    def _poll(self) -> None:
        while not self._over.wait(SECONDS):
            message = self._find_dead()
            if message and not self._over.wait(GRACE):
                logger.error("%s", message)
                for child in _children:
                    child.kill()
                sys.stderr.flush()
                os._exit(1)  # the main thread may be waiting for the dead process

    def _find_dead(self) -> str | None:
        if self.parent and os.getppid() != self.parent:
            return death_message("Process 0", "an error or a signal")
        for rank, child in enumerate(_children, 1):
            if child.poll():
                return death_message(f"Process {rank}", child.returncode)
        return None


class _Fit:
    """Function that a child process runs; a ``NonFiniteLossError``, which all children raise, is returned as the result."""

    def __init__(self, function: Callable[..., Any], *, forked: bool) -> None:
        self.function, self.forked = function, forked
        self.filters = list(warnings.filters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork inherits the handler of its parent
        warnings.filters[:] = self.filters  # type: ignore[index]
        if self.forked:
            torch.set_num_threads(1)  # OpenMP would wait for threads, which do not survive a fork
        try:
            with ProcessWatchdog(os.getppid()):
                return self.function(*args, **kwargs)
        except NonFiniteLossError as error:
            trainer: pl.Trainer = self.function.__self__  # type: ignore[attr-defined]
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                callback.on_exception(trainer, trainer.lightning_module, error)
            finish_averages(trainer, trainer.lightning_module)
            return error


class StateReturningLauncher(MultiProcessingLauncher):
    """Starts processes by fork or spawn, and restores their final state in the trainer and callbacks of this process."""

    def __init__(self, strategy: ParallelStrategy, start_method: Literal["fork", "spawn"]) -> None:
        super().__init__(strategy, start_method=start_method)
        self.forked = start_method == "fork"

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes, wait for them, and return their result.

        Raises
        ------
        NonFiniteLossError
            If the loss is not finite.
        DeadProcessError
            If a process died.
        RuntimeError
            If a process raised another error.
        """
        port = os.environ.get("MASTER_PORT")
        # Ctrl-C stops the children, which return their weights; the runner restores the handler.
        SignalLatch().arm(signal.SIGINT)
        fit = _Fit(function, forked=self.forked)
        try:
            result = super().launch(fit, *args, trainer=trainer, **kwargs)
        except ProcessExitedException as error:
            name = error.signal_name or f"exit code {error.exit_code}"
            raise DeadProcessError(death_message(f"Process {error.error_index}", name)) from error
        except ProcessRaisedException as error:
            message = _error_message(error)
            raise (DeadProcessError if is_connection_error(RuntimeError(message)) else RuntimeError)(message) from error
        except KeyboardInterrupt:
            for process in self.procs:
                process.terminate()
            raise
        finally:
            if port is None:  # so that the next training chooses a free port
                os.environ.pop("MASTER_PORT", None)
        if isinstance(result, NonFiniteLossError):
            raise result
        return result

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Add the state of callbacks and loops to Lightning's results."""
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}  # type: ignore[attr-defined]
        states = {"callbacks": callbacks, "loop": trainer.fit_loop.state_dict()}
        image = BytesIO()
        torch.save(states, image)  # as bytes, because shared memory of a child is freed when it ends
        return super().get_extra_results(trainer) | {STATES: image.getvalue()}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Restore the state of callbacks and loops."""
        # weights_only=False is safe: the bytes come from a child process. The state of a callback may be any object.
        states = torch.load(BytesIO(extra.pop(STATES)), weights_only=False)
        super().update_main_process_results(trainer, extra)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.load_state_dict(states["callbacks"][callback.state_key])
        trainer.fit_loop.load_state_dict(states["loop"])


def run_inline(function: Callable[[], Result]) -> Result:
    """Call a function in this process."""
    return function()


def run_in_subprocess(function: Callable[[], Result]) -> Result:
    """Call a function in a forked process, which may use a GPU before this process does."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def reply() -> None:
        try:
            send.send((function(), None))
        except Exception as error:  # noqa: BLE001  raised in the parent
            send.send((None, error))

    process = context.Process(target=reply)
    process.start()
    send.close()
    try:
        result, error = receive.recv()
    except EOFError:
        raise RuntimeError("the process that queries the GPU has died") from None
    finally:
        process.join()
    if error is not None:
        raise error
    return cast("Result", result)


def _error_message(error: ProcessRaisedException) -> str:
    """The error of a process in one line, which is the text after the indented traceback."""
    cause = str(error).strip().rpartition("\n  ")[2].partition("\n")[2]
    return f"Process {error.error_index} of the training failed: {' '.join(cause.split()) or 'an error'}"


class LaunchedDDPStrategy(MultiProcessingDDPStrategy):
    """DDP in forked or spawned processes, which return their state to this process."""

    launcher_class = StateReturningLauncher
