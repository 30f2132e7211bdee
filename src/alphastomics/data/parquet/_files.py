"""Folders, checksums and errors of Parquet files and their metadata."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from alphastomics._io import _json
from alphastomics._io._errors import WRITE, describe_error, permission_error
from alphastomics.data.parquet._columns import from_arrow

if TYPE_CHECKING:
    from pathlib import Path

    from alphastomics.data.parquet._columns import Cells

ROW_GROUP = 4096  # cells: few enough for the buffers of a writer, many enough for a context to lie in few of them
GROUP_VALUES = 2**28  # cells times genes of a row group: a column chunk, stored as one page, is at most 1 GiB
BLOCK = 2**20
LARGEST_JSON = 2**28  # bytes: a thousand slices that lack ten thousand genes each


def make_folder(path: Path) -> None:
    """Make a folder, unless it is there.

    Raises
    ------
    OSError
        If that cannot be done.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"the folder {path} cannot be created ({describe_error(error)}); {WRITE}") from error


def check_written(path: Path) -> None:
    """Raise an error for a file that another machine wrote and this one does not see.

    Raises
    ------
    FileNotFoundError
        If it is not here.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} was written by a worker and is missing here; all machines must share this folder under the same path"
        )


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file.

    Raises
    ------
    PermissionError
        If it may not be read.
    ValueError
        If it is none, or cut off.
    """
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except PermissionError as error:
        raise permission_error(path, error) from error
    except Exception as error:  # a damaged file can break the reader in any way
        raise ValueError(
            f"{path} is not a complete Parquet file ({describe_error(error)}); make the dataset again"
        ) from error


def read_group(file: pq.ParquetFile, group: int, n_genes: int, path: Path) -> Cells:
    """Cells of one row group.

    Raises
    ------
    ValueError
        If it is damaged.
    """
    try:
        return from_arrow(file.read_row_group(group), n_genes)
    except Exception as error:  # likewise
        raise ValueError(
            f"Row group {group} of {path} is damaged ({describe_error(error)}); make the dataset again"
        ) from error


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def footer_checksum(path: Path) -> str:
    """SHA-256 of the footer of a Parquet file, which locates all pages and holds the extremes of its columns.

    Raises
    ------
    PermissionError
        If it may not be read.
    ValueError
        If the file is not there or not whole.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 8))
            length, magic = int.from_bytes(file.read(4), "little"), file.read(4)
            if magic != b"PAR1" or length + 8 > size:
                raise ValueError("its end is missing")
            file.seek(size - 8 - length)
            return hashlib.sha256(file.read()).hexdigest()
    except PermissionError as error:
        raise permission_error(path, error) from error
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is not a complete Parquet file ({describe_error(error)}); make the dataset again"
        ) from error


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises
    ------
    PermissionError
        If it may not be read.
    ValueError
        If it is none.
    """
    try:
        return _json.read(path, max_bytes=LARGEST_JSON)
    except PermissionError as error:
        raise permission_error(path, error) from error
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} is not JSON ({describe_error(error)}); delete it and make the dataset again"
        ) from error
