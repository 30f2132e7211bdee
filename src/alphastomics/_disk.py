"""What is said of a file that cannot be written or read: which, why, and what to do about it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

WRITE = "see to room and permission there, or name another folder, and repeat the command"
READ = "see to its permissions and those of its folder, and repeat the command"


def reason(error: BaseException) -> str:
    """Why, in a few words."""
    said = getattr(error, "strerror", None) or str(error)
    return (said.splitlines() or [type(error).__name__])[0]


@contextmanager
def naming(path: str | PathLike[str]) -> Iterator[None]:
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
        raise type(error)(f"{path} cannot be written ({reason(error)}); {WRITE}") from error


def denied(path: str | PathLike[str], error: PermissionError) -> PermissionError:
    """What is said of a file that may not be read, which is no fault of what it holds."""
    return PermissionError(f"{path} may not be read ({reason(error)}); {READ}")
