"""Parquet files that are whole or absent, and what is wrong with those that are not."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from alphastomics.data.parquet._columns import to_arrow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from alphastomics.data.parquet._columns import Cells

ROW_GROUP = 8192  # cells: a context of a slice up to this size is one read
TEMPORARY = ".tmp"
BLOCK = 2**20


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name in the same folder, which becomes ``path`` if all goes well and is removed if not."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, schema: pa.Schema) -> Iterator[CellWriter]:
    """Write a file of cells; it appears when it is whole."""
    pool = pa.system_memory_pool()  # that of Arrow keeps a row group's worth of memory when all is written
    with (
        replacing(path) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd", write_page_checksum=True, memory_pool=pool) as file,
    ):
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
    ValueError
        If it is none, or cut off.
    """
    try:
        return pq.ParquetFile(path, page_checksum_verification=True)
    except (pa.ArrowInvalid, pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no whole Parquet file ({_first_line(error)}); make the dataset again") from error


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, values: Any) -> None:
    """Write strict JSON, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises
    ------
    ValueError
        If it is none.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({_first_line(error)}); make the dataset again") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
