"""Error messages about files: which file, what is wrong, what to do."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike
    from pathlib import Path

WRITE = "check free space and permissions, or choose another folder, and repeat the command"
READ = "check its permissions and those of its folder, and repeat the command"
LONGEST_LINE = 300  # characters of a reason
LONGEST = 60  # characters of a value
N_NAMES = 5


def describe_error(error: BaseException) -> str:
    """The reason of an error in one line."""
    return one_line(getattr(error, "strerror", None) or str(error)) or type(error).__name__


def one_line(text: str) -> str:
    """The first line of a text, at most ``LONGEST_LINE`` characters of it."""
    line = (text.splitlines() or [""])[0]
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def format_value(value: Any) -> str:
    """Format a value from a file for a message: short text and numbers as they are, anything else by its type."""
    if not isinstance(value, (str, int, float, type(None))):
        return f"a {type(value).__name__}"
    text = repr(value[: LONGEST + 1] if isinstance(value, str) else value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def format_names(names: Sequence[object]) -> str:
    """The first names of a list, for a message."""
    return ", ".join(map(repr, names[:N_NAMES])) + (", …" if len(names) > N_NAMES else "")


@contextmanager
def os_errors_for(path: str | PathLike[str]) -> Iterator[None]:
    """Add the path and a remedy to errors of the operating system while ``path`` is written."""
    try:
        yield
    except OSError as error:
        if error.errno is None and str(path) in str(error):  # names the file already
            raise
        raise type(error)(f"{path} cannot be written ({describe_error(error)}); {WRITE}") from error


def check_folder(path: Path) -> None:
    """Check that a folder can be made and written to, without making it."""
    existing = next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))
    if not existing.is_dir():
        raise NotADirectoryError(f"{path} cannot be written ({existing} is a file); {WRITE}")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written ({existing} is read-only); {WRITE}")


def permission_error(path: str | PathLike[str], error: PermissionError) -> PermissionError:
    """The error for a file without read permission."""
    return PermissionError(f"{path} cannot be read ({describe_error(error)}); {READ}")
