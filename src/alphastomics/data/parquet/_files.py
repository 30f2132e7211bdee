"""Folders, checksums and errors of Parquet files and their metadata."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from alphastomics._io import _json
from alphastomics._io._errors import WRITE, describe_error, permission_error
from alphastomics.data.parquet._columns import from_arrow

if TYPE_CHECKING:
    import mmap
    from pathlib import Path

    from alphastomics.data.parquet._columns import Cells

ROW_GROUP = 4096  # cells: few enough for the buffers of a writer, enough for a context to need few row groups
GROUP_VALUES = 2**28  # cells times genes of a row group: a column chunk, stored as one page, is at most 1 GiB
BLOCK = 2**20
LARGEST_JSON = 2**28  # bytes: a thousand slices that lack ten thousand genes each


def make_folder(path: Path) -> None:
    """Create a folder unless it exists; the message of an OSError names it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise type(error)(f"the folder {path} cannot be created ({describe_error(error)}); {WRITE}") from error


def check_written(path: Path) -> None:
    """Raise a FileNotFoundError for a file that another machine wrote and that is missing on this one."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} was written by a worker and is missing here; all machines must share this folder under the same path"
        )


def open_parquet(path: Path, content: mmap.mmap | None = None) -> pq.ParquetFile:
    """Open a Parquet file, or its mapped content, which opens no further file.

    Raises PermissionError if it cannot be read, ValueError if it is incomplete or of another format.
    """
    try:
        source = path if content is None else pa.BufferReader(pa.py_buffer(content))
        return pq.ParquetFile(source, page_checksum_verification=True)
    except PermissionError as error:
        raise permission_error(path, error) from error
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{path} is not a complete Parquet file ({describe_error(error)}); make the dataset again"
        ) from error


def read_group(file: pq.ParquetFile, group: int, n_genes: int, path: Path) -> Cells:
    """Cells of one row group; raises ValueError if it is damaged."""
    try:
        return from_arrow(file.read_row_group(group), n_genes)
    except Exception as error:  # a damaged file can raise anything
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

    Raises ``PermissionError`` without read permission, ``ValueError`` if the file is missing or incomplete.
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
    """Read JSON; raises PermissionError without read permission, ValueError for anything but JSON."""
    try:
        return _json.read(path, max_bytes=LARGEST_JSON)
    except PermissionError as error:
        raise permission_error(path, error) from error
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{path} is not JSON ({describe_error(error)}); delete it and make the dataset again"
        ) from error
