"""Atomic writes: a file is written under a temporary name in its folder, then renamed, so that it is complete or absent."""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from alphastomics._io._errors import os_errors_for

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}\.tmp(\.[^.]+)?")  # names of `replacing` with unique=True


@contextmanager
def replacing(path: Path, *, unique: bool = False, sync: bool = False, is_writer: bool = True) -> Iterator[Path]:
    """Yield a temporary name that becomes ``path`` on success and is removed on failure.

    Until the block ends without an error, an earlier version of the file stays as it is. If ``path`` is a symbolic link, the
    file that it points to is replaced, and the temporary file is in the folder of that. With ``unique``, several
    processes may write the file at once, each under a temporary name of its own, which :func:`remove_temporary` finds
    after a process was killed. With ``sync``, the content is forced to disk before the file is renamed, so that it
    survives a power failure. Processes that write one file together share its temporary name, and the one with
    ``is_writer`` renames it.
    """
    token = f".{uuid4().hex}" if unique else ""
    target = follow_link(path)
    temporary = target.with_name(f".{target.stem}{token}.tmp{path.suffix}")
    try:
        with os_errors_for(path):
            yield temporary
            if is_writer:
                if sync and temporary.is_file():
                    with temporary.open("rb+") as file:
                        os.fsync(file.fileno())
                temporary.replace(target)
    finally:
        if is_writer:
            with suppress(OSError):  # without write permission there is no temporary file either
                temporary.unlink()


def follow_link(path: Path) -> Path:
    """The file that a symbolic link points to, which may not exist yet; any other path as it is."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


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
