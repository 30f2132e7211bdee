"""What is said of a file that cannot be written or read: which, why, and what to do about it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike
    from pathlib import Path

WRITE = "see to room and permission there, or name another folder, and repeat the command"
LONGEST_LINE = 300  # characters of a reason
LONGEST = 60  # characters of a value of a file in a message
READ = "see to its permissions and those of its folder, and repeat the command"


def describe_error(error: BaseException) -> str:
    """Why, in a few words."""
    return one_line(getattr(error, "strerror", None) or str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """The first line of a text, not too long."""
    line = (text.splitlines() or [""])[0]
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def format_value(value: Any) -> str:
    """A value of a file in a message: text and numbers in one line, not too long, of anything else what it is.

    What is made of lists of lists has a representation as long as its author likes.
    """
    if not isinstance(value, (str, int, float, type(None))):
        return f"a {type(value).__name__}"
    text = repr(value[: LONGEST + 1] if isinstance(value, str) else value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


@contextmanager
def os_errors_for(path: str | PathLike[str]) -> Iterator[None]:
    """Tell what the system says while ``path`` is written as a sentence about it.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a sentence already
            raise
        raise type(error)(f"{path} cannot be written ({describe_error(error)}); {WRITE}") from error


def permission_error(path: str | PathLike[str], error: PermissionError) -> PermissionError:
    """What is said of a file that may not be read, which is no fault of what it holds."""
    return PermissionError(f"{path} may not be read ({describe_error(error)}); {READ}")


def check_inside(folder: Path, path: Path) -> None:
    """Refuse a file of a folder that is a link to somewhere else.

    The cache of huggingface_hub is made of links, from ``snapshots/<version>`` to ``blobs``, and may be.

    Raises
    ------
    ValueError
        If it is.
    """
    root, there = folder.resolve(), path.resolve()
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(there.is_relative_to(each) for each in roots):
        raise ValueError(f"{path} is a link that leads out of its folder; copy the file itself there")


def check_memory(n_bytes: int) -> None:
    """Refuse what says that it is larger than the memory of this machine, before any of it is taken.

    Raises
    ------
    ValueError
        If it does; the message says nothing of the file, which whoever asks knows.
    """
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return
    if n_bytes > memory:
        raise ValueError(
            f"it says that it holds {n_bytes / 2**30:,.0f} GiB, more than the {memory / 2**30:,.0f} GiB of this machine"
        )
