"""Readers of files in child processes, so that hangs and crashes are recorded as results."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CLEAR = (ValueError, KeyError, OSError, FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
CODE = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "pickle.find_class")
MEMORY = 4 * 2**30  # bytes that a child may take beyond what it has
MAKING = 60.0  # seconds


class Inputs(Protocol):
    """A kind of files."""

    def make(self, folder: Path, rng: np.random.Generator) -> None:
        """Write one into an empty folder, with a pickle, if any, that makes ``folder / "executed"``."""

    def read(self, folder: Path) -> None:
        """Read it as a user would."""


class Outcome(NamedTuple):
    """Result of reading an input.

    Attributes
    ----------
    number
        Number of the input.
    verdict
        ``"accepted"``, ``"refused"`` with one line, ``"unclear"``, ``"code"`` that ran, ``"hang"`` or ``"crash"``.
    message
        Error message.
    seconds
        Duration.
    mebibytes
        Peak memory beyond that before reading.
    """

    number: int
    verdict: str
    message: str
    seconds: float
    mebibytes: float


def run(inputs: Inputs, numbers: Sequence[int], seed: Sequence[int], folder: Path, limit: float) -> Iterator[Outcome]:
    """Make and read inputs, each from its own random generator and with a time limit."""
    left = list(numbers)
    while left:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(reading)
            _work(inputs, left, seed, folder, writing)
        os.close(writing)
        try:
            yield from _watch(reading, child, left, limit)
        finally:
            os.close(reading)


def _watch(reading: int, child: int, left: list[int], limit: float) -> Iterator[Outcome]:
    """Results of a child process until it ends or is killed; finished inputs are removed from ``left``."""
    waiting, is_reading, start = b"", False, time.monotonic()
    while True:
        rest = start + (limit if is_reading else MAKING) - time.monotonic()
        ready, _, _ = select.select([reading], [], [], max(0.0, rest))
        data = os.read(reading, 2**16) if ready else b""
        waiting += data
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            start, is_reading = time.monotonic(), line == b"begin"
            if not is_reading:
                left.pop(0)
                yield Outcome(*json.loads(line))
        if data:
            continue
        if not ready:
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if left and not is_reading:
            raise RuntimeError(f"input {left[0]} could not be made (status {status})")
        if left:
            verdict = "crash" if ready else "hang"
            yield Outcome(left.pop(0), verdict, f"status {status}", time.monotonic() - start, 0.0)
        return


def _work(inputs: Inputs, numbers: Sequence[int], seed: Sequence[int], folder: Path, writing: int) -> None:
    """Main function of a child process."""
    status = 1
    try:
        ran = _prepare()
        for number in numbers:
            place = folder / "input"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            inputs.make(place, np.random.default_rng([*seed, number]))
            ran.clear()
            os.write(writing, b"begin\n")
            before, start = _memory(reset=True), time.monotonic()
            verdict, message = _outcome(inputs, place)
            seconds = time.monotonic() - start
            if ran or (place / "executed").exists():
                verdict, message = "code", f"{ran} {message}"
            outcome = Outcome(number, verdict, message, seconds, max(0.0, _memory() - before))
            os.write(writing, json.dumps(outcome).encode() + b"\n")
        status = 0
    except BaseException as error:  # noqa: BLE001  a child never returns to the code of its parent
        sys.__stderr__.write(f"{type(error).__name__}: {error}\n")
    finally:
        os._exit(status)


def _prepare() -> list[str]:
    """Redirect output, limit memory, and return a list that records code executed by a file."""
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    warnings.simplefilter("ignore")
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ran: list[str] = []

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if event in CODE:
            ran.append(f"{event}{arguments!r:.200}")

    sys.addaudithook(record)
    return ran


def _memory(*, reset: bool = False) -> float:
    """Peak memory since the last reset, MiB."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def _outcome(inputs: Inputs, place: Path) -> tuple[str, str]:
    """Read an input and return the result."""
    try:
        inputs.read(place)
    except BaseException as error:  # noqa: BLE001  every error is an outcome
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        return ("refused" if _is_clear(error, text, place) else "unclear"), f"{type(error).__name__}: {text[:600]}"
    return "accepted", ""


def _is_clear(error: BaseException, text: str, place: Path) -> bool:
    """Whether an error is of a documented type and one line that names the file or a remedy."""
    names_cause: Any = str(place) in text or any(
        mark in text for mark in ("; ", "check ", "remove ", "choose ", "pass ")
    )
    return type(error) in CLEAR and "\n" not in text and bool(names_cause)
