"""Parquet files that are whole or absent, and what is wrong with those that are not."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from alphastomics._io import _json
from alphastomics._io._atomic import replacing
from alphastomics._io._errors import WRITE, describe_error, permission_error
from alphastomics.data.parquet._columns import EXPRESSION, INDICES, POSITION, VALUES, from_arrow, to_arrow
from alphastomics.data.parquet._footer import check_room, read_footer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from alphastomics.data.parquet._columns import Cells

ROW_GROUP = 4096  # cells: few enough for the buffers of a writer, many enough for a context to lie in few of them
GROUP_VALUES = 2**28  # cells times genes: a page, which is what a row group has of a column, is at most 2 GB
BLOCK = 2**20
LARGEST_PAGE = 2**31 - 1
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
        raise type(error)(f"the folder {path} cannot be made ({describe_error(error)}); {WRITE}") from error


def check_written(path: Path) -> None:
    """Refuse a file that only the machine which wrote it can see.

    Raises
    ------
    FileNotFoundError
        If it is not here.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} was written and is not here; every machine must see the same folder under this path"
        )


@contextmanager
def writing(path: Path, schema: pa.Schema, *, mapped: bool = False) -> Iterator[CellWriter]:
    """Write a file of cells; it appears when it is whole.

    Parameters
    ----------
    path
        The file.
    schema
        Its columns.
    mapped
        Whether expression is stored so that :mod:`~alphastomics.data.parquet._pages` reads it; it is compressed if not.
    """
    options: dict[str, Any] = {
        "compression": "zstd",
        "write_page_checksum": True,
        # That of Arrow keeps a row group's worth of memory when all is written.
        "memory_pool": pa.system_memory_pool(),
    }
    if mapped:
        plain = [f"{name}.list.element" for name in (EXPRESSION, INDICES, VALUES) if name in schema.names]
        others = [name for name in schema.names if name not in (EXPRESSION, INDICES, VALUES, POSITION)]
        options |= {
            "compression": dict.fromkeys([*others, f"{POSITION}.list.element"], "zstd") | dict.fromkeys(plain, "none"),
            "use_dictionary": others,
            "write_statistics": others,
            "data_page_size": LARGEST_PAGE,
        }
    with replacing(path, unique=True) as temporary, pq.ParquetWriter(temporary, schema, **options) as file:
        yield CellWriter(file, schema)


class CellWriter:
    """Row groups of an open file.

    Parameters
    ----------
    file
        The file.
    schema
        Its columns.
    """

    def __init__(self, file: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._file, self._schema = file, schema

    def write(self, *parts: Cells) -> None:
        """Write cells of one slice as one row group, without bringing them together before."""
        table = pa.concat_tables([to_arrow(cells, self._schema) for cells in parts])
        self._file.write_table(table, row_group_size=len(table))


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
            f"{path} is no whole Parquet file ({describe_error(error)}); make the dataset again"
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


def check_whole(path: Path) -> None:
    """Refuse a file whose end makes no sense, or whose cells do not fit into memory together.

    Raises
    ------
    ValueError
        If it is so.
    """
    try:
        footer = read_footer(path)
        check_room(footer, range(len(footer)))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} is no whole Parquet file ({describe_error(error)}); make the dataset again"
        ) from error


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def footer_checksum(path: Path) -> str:
    """SHA-256 of the end of a Parquet file, which says where everything is, and what its columns begin and end with.

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
            f"{path} is no whole Parquet file ({describe_error(error)}); make the dataset again"
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
