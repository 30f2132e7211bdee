"""Files that are complete or absent: written under a temporary name in the same folder, then renamed."""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from alphastomics._io._errors import os_errors_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp(\.[^.]+)?")  # names that `replacing` gives with unique=True


@contextmanager
def replacing(path: Path, *, unique: bool = False, sync: bool = False, is_writer: bool = True) -> Iterator[Path]:
    """Yield a temporary name that becomes ``path`` on success and is removed on failure.

    Parameters
    ----------
    path
        The file. Until the block ends without an error, an earlier version of it stays as it is.
    unique
        Whether several processes may write this file at once: each then has a temporary name of its own, which
        :func:`remove_temporary` finds again if the process is killed.
    sync
        Whether the content is forced to disk before the name changes, so that it survives a power failure.
    is_writer
        Whether this process changes the name. Processes that write one file together agree on its temporary name.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    token = f".{uuid4().hex}" if unique else ""
    temporary = path.with_name(f".{path.stem}{token}.tmp{path.suffix}")
    try:
        with os_errors_for(path):
            yield temporary
            if is_writer:
                if sync and temporary.is_file():
                    with temporary.open("rb+") as file:
                        os.fsync(file.fileno())
                temporary.replace(path)
    finally:
        if is_writer:
            with suppress(OSError):  # without write permission there is no temporary file either
                temporary.unlink()


def write_text(path: Path, text: str, *, unique: bool = False) -> None:
    """Write a text file atomically."""
    with replacing(path, unique=unique) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, values: Any, *, unique: bool = False) -> None:
    """Write strict JSON atomically."""
    write_text(path, json.dumps(values, indent=1, allow_nan=False) + "\n", unique=unique)


def remove_temporary(folder: Path) -> None:
    """Remove the temporary files with unique names that killed processes left in a folder."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)
