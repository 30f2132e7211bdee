"""What of an output folder stage 2 has written, so that nothing else is ever removed.

A name alone says nothing: ``data/train.parquet`` may be anybody's. Ours are files that ``metadata.json`` lists, Parquet files
that say so in their footer, and what lies beside ``parameters.json`` under names that stage 2 gives.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from alphastomics.data.parquet._dataset import FOLDER, SPLITS
from alphastomics.data.parquet._files import LEFT, TEMPORARY, read_json
from alphastomics.data.parquet._note import NOTE as FOOTER
from alphastomics.data.preprocess._shards import NOTE

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

BEGUN = "parameters.json"
_STEM = rf"({'|'.join(SPLITS)})(-\d+)?"
SHARD, SHARD_NOTE = re.compile(rf"{_STEM}\.parquet"), re.compile(rf"{_STEM}{re.escape(NOTE)}")


def unfinished_folder(output_dir: Path) -> Path:
    """Where files are until all of them are there."""
    return output_dir / f"{FOLDER}{TEMPORARY}"


def check_ownership(output_dir: Path, listed: Collection[str] = ()) -> None:
    """Refuse a folder in which something would be removed that stage 2 has not written.

    Parameters
    ----------
    output_dir
        The folder of a dataset.
    listed
        Names of the files in ``data`` that its ``metadata.json`` lists.

    Raises
    ------
    FileExistsError
        If there is such a thing; the message names it.
    """
    _check(output_dir / FOLDER, lambda path: path.is_file() and (path.name in listed or _is_shard(path)))
    unfinished = unfinished_folder(output_dir)
    if _is_begun(unfinished / BEGUN):
        _check(unfinished, lambda path: path.name == BEGUN or _is_named(path))
    else:  # ended before the first file, or after the last
        _check(unfinished, lambda path: bool(LEFT.fullmatch(path.name)) or _is_shard(path))


def clear(folder: Path) -> None:
    """Remove a folder that :func:`check_ownership` has let pass; what marks it as ours goes last."""
    if folder.is_dir():
        for path in sorted(folder.iterdir(), key=lambda path: path.name == BEGUN):
            path.unlink(missing_ok=True)
        folder.rmdir()


def _check(folder: Path, is_ours: Callable[[Path], bool]) -> None:
    found = [folder] if folder.is_symlink() or folder.exists() else []
    if folder.is_dir() and not folder.is_symlink():
        found = [path for path in sorted(folder.iterdir()) if path.is_symlink() or not is_ours(path)]
    if found:
        raise FileExistsError(f"{found[0]} is there, and not of a dataset; move it away, or name another folder")


def _is_begun(path: Path) -> bool:
    try:
        values = read_json(path) if path.is_file() else None
    except ValueError:
        return False
    return isinstance(values, dict) and {"stage2", "slices"} <= set(values)


def _is_named(path: Path) -> bool:
    return path.is_file() and any(kind.fullmatch(path.name) for kind in (SHARD, SHARD_NOTE, LEFT))


def _is_shard(path: Path) -> bool:
    """Whether a file is named as one of a dataset and says of its genes what we write."""
    if not (SHARD.fullmatch(path.name) and path.is_file()):
        return False
    try:
        return FOOTER in (pq.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False
