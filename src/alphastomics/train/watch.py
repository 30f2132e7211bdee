"""A process of a training that dies: the others end within half a minute, with a sentence that says what to do.

Who talks to it is told that it has died, by gloo at once, by NCCL after ten minutes or never. So each process also looks after
those that it started, and after the one that started it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    import lightning.pytorch as pl

logger = logging.getLogger(__name__)

SECONDS = 1.0  # between two looks
GRACE = 20.0  # in which a process that is told of a death can end in its own way
REMEDY = "what it said is above; a training with a checkpoint goes on where it was with resume='last'"
LAUNCHER = "ALPHASTOMICS_LAUNCHER"  # variable of a process that was started for a training: the process that did
LOST = ("gloo", "connection closed by peer", "connection reset by peer", "nccl")

_children: list[subprocess.Popen[bytes]] = []  # rank 1 and so on, if this process has started them


class DeadProcessError(RuntimeError):
    """Another process of the training has died, so that this one cannot go on."""


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process cannot be reached."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(word in text for word in LOST))


def died(who: str, how: int | str) -> str:
    """What is said of a process that has died, by a signal if its status is negative."""
    if isinstance(how, int):
        how = f"exit code {how}" if how >= 0 else signal.Signals(-how).name
    return f"{who} of the training ended by {how}; {REMEDY}"


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the script once more for each further device; :class:`Watch` looks after these processes.

    Lightning's own observer kills this one without a word, whether it trains or not.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Start them, and call the function."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            os.environ[LAUNCHER] = str(os.getpid())
            try:
                self._call_children_scripts()
            finally:
                del os.environ[LAUNCHER]
            _children.extend(self.procs)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)


class Watch:
    """As long as it is open, this process does not outlive those with which it trains for more than some seconds.

    Parameters
    ----------
    parent
        The process without which this one is of no use; None: the one that started it for a training, if one did.
    """

    def __init__(self, parent: int | None = None) -> None:
        self.parent = int(os.environ.get(LAUNCHER, 0)) if parent is None else parent
        self._over = threading.Event()

    def __enter__(self) -> Watch:
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
            return died("Process 0", "another way than by finishing")
        for rank, child in enumerate(_children, 1):
            if child.poll():
                return died(f"Process {rank}", child.returncode)
        return None
