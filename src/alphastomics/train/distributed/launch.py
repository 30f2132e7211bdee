"""A process of a training that dies: the others end within half a minute, with a sentence that says what to do.

Who talks to it is told that it has died, by gloo at once, by NCCL after ten minutes or never. So each process also looks after
those that it started, and after the one that started it.

Processes that are started for a training, and what they leave to the one that started them.

A child has its own copy of everything: weights, callbacks, counters. When it ends, rank 0 hands them back: the weights, as
Lightning does; the state of every callback, which is what a checkpoint would hold of it; and how far the loops came.
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
from alphastomics.train.ema import BestAverage, MovingAverage
from alphastomics.train.interrupt import SignalLatch
from alphastomics.train.optimization import NonFiniteLossError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    import lightning.pytorch as pl
    from lightning.pytorch.strategies import ParallelStrategy

logger = logging.getLogger(__name__)

SECONDS = 1.0  # between two looks
GRACE = 20.0  # in which a process that is told of a death can end in its own way
REMEDY = "what it said is above; a training with a checkpoint goes on where it was with resume='last'"
LAUNCHER = "ALPHASTOMICS_LAUNCHER"  # variable of a process that was started for a training: the process that did
LOST = ("gloo", "connection closed by peer", "connection reset by peer", "nccl")

_children: list[subprocess.Popen[bytes]] = []  # rank 1 and so on, if this process has started them


class DeadProcessError(RuntimeError):
    """Another process of the training has died, so that this one cannot go on."""


def is_connection_error(error: BaseException) -> bool:
    """Whether an error says that another process cannot be reached."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(word in text for word in LOST))


def death_message(who: str, how: int | str) -> str:
    """What is said of a process that has died, by a signal if its status is negative."""
    if isinstance(how, int):
        how = f"exit code {how}" if how >= 0 else signal.Signals(-how).name
    return f"{who} of the training ended by {how}; {REMEDY}"


class WatchedScriptLauncher(ScriptLauncher):
    """Starts the script again for each further device; :class:`ProcessWatchdog` looks after these processes."""

    def start_processes(self) -> None:
        """Start them, each with the id of this process."""
        os.environ[LAUNCHER] = str(os.getpid())
        try:
            super().start_processes()
        finally:
            del os.environ[LAUNCHER]
        _children.extend(self.procs)


class ProcessWatchdog:
    """As long as it is open, this process does not outlive those with which it trains for more than some seconds.

    Parameters
    ----------
    parent
        The process without which this one is of no use; None: the one that started it for a training, if one did.
    """

    def __init__(self, parent: int | None = None) -> None:
        self.parent = int(os.environ.get(LAUNCHER, 0)) if parent is None else parent
        self._over = threading.Event()

    def __enter__(self) -> ProcessWatchdog:
        """Begin to look."""
        threading.Thread(target=self._look, name="watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Look no more."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(SECONDS):
            said = self._dead()
            if said and not self._over.wait(GRACE):
                logger.error("%s", said)
                for child in _children:
                    child.kill()
                sys.stderr.flush()
                os._exit(1)  # the main thread waits for an answer that will not come

    def _dead(self) -> str | None:
        if self.parent and os.getppid() != self.parent:
            return death_message("Process 0", "another way than by finishing")
        for rank, child in enumerate(_children, 1):
            if child.poll():
                return death_message(f"Process {rank}", child.returncode)
        return None


Answer = TypeVar("Answer")

STATES = "alphastomics"  # what is handed back, among the results of Lightning


class _Fit:
    """What a child runs; a loss that is not finite, which all children refuse together, is a result like any other."""

    def __init__(self, function: Callable[..., Any], *, forked: bool) -> None:
        self.function, self.forked = function, forked
        self.filters = list(warnings.filters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork has the handler of its parent
        warnings.filters[:] = self.filters  # type: ignore[index]
        if self.forked:
            torch.set_num_threads(1)  # the threads of the parent do not survive a fork, and OpenMP waits for them
        try:
            with ProcessWatchdog(os.getppid()):
                return self.function(*args, **kwargs)
        except NonFiniteLossError as error:
            trainer: pl.Trainer = self.function.__self__  # type: ignore[attr-defined]
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                callback.on_exception(trainer, trainer.lightning_module, error)
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, (MovingAverage, BestAverage)):
                    callback.finish(trainer.lightning_module)
            return error


class StateReturningLauncher(MultiProcessingLauncher):
    """Starts processes by fork or spawn; after it, trainer and callbacks are as if they had trained themselves."""

    def __init__(self, strategy: ParallelStrategy, start_method: Literal["fork", "spawn"]) -> None:
        super().__init__(strategy, start_method=start_method)
        self.forked = start_method == "fork"

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start the processes, wait for them, and take their results.

        Raises
        ------
        NonFiniteLossError
            If they raised one.
        DeadProcessError
            If a process died.
        RuntimeError
            If a process failed.
        """
        port = os.environ.get("MASTER_PORT")
        # The first Ctrl-C is for the children, who hand back what they learned; the runner restores it.
        SignalLatch().arm(signal.SIGINT)
        fit = _Fit(function, forked=self.forked)
        try:
            result = super().launch(fit, *args, trainer=trainer, **kwargs)
        except ProcessExitedException as error:
            name = error.signal_name or f"exit code {error.exit_code}"
            raise DeadProcessError(death_message(f"Process {error.error_index}", name)) from error
        except ProcessRaisedException as error:
            said = _last_words(error)
            raise (DeadProcessError if is_connection_error(RuntimeError(said)) else RuntimeError)(said) from error
        except KeyboardInterrupt:
            for process in self.procs:
                process.terminate()
            raise
        finally:
            if port is None:  # the next training shall find a free one
                os.environ.pop("MASTER_PORT", None)
        if isinstance(result, NonFiniteLossError):
            raise result
        return result

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """Add the state of callbacks and loops to what Lightning hands back."""
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}  # type: ignore[attr-defined]
        states = {"callbacks": callbacks, "loop": trainer.fit_loop.state_dict()}
        image = BytesIO()
        torch.save(states, image)  # tensors as bytes: what a child shares is gone when it ends
        return super().get_extra_results(trainer) | {STATES: image.getvalue()}

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """Take it up."""
        # These bytes come from our own child, and callbacks may keep whatever they like.
        states = torch.load(BytesIO(extra.pop(STATES)), weights_only=False)
        super().update_main_process_results(trainer, extra)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            callback.load_state_dict(states["callbacks"][callback.state_key])
        trainer.fit_loop.load_state_dict(states["loop"])


def run_inline(question: Callable[[], Answer]) -> Answer:
    """Ask here."""
    return question()


def run_in_subprocess(question: Callable[[], Answer]) -> Answer:
    """Ask in a process of its own, which may use a GPU that this one must not touch yet."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def reply() -> None:
        try:
            send.send((question(), None))
        except Exception as error:  # noqa: BLE001  raised where it was asked
            send.send((None, error))

    process = context.Process(target=reply)
    process.start()
    send.close()
    try:
        answer, error = receive.recv()
    except EOFError:
        raise RuntimeError("the process that was to ask the GPU has died") from None
    finally:
        process.join()
    if error is not None:
        raise error
    return cast("Answer", answer)


def _last_words(error: ProcessRaisedException) -> str:
    """What a process died of, in a sentence: what follows its traceback, whose lines are indented."""
    cause = str(error).strip().rpartition("\n  ")[2].partition("\n")[2]
    return f"Process {error.error_index} of the training failed: {' '.join(cause.split()) or 'an error'}"


class LaunchedDDPStrategy(MultiProcessingDDPStrategy):
    """Lightning's DDP in forked or spawned processes, which return their state to the process that started them."""

    launcher_class = StateReturningLauncher
