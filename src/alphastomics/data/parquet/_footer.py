"""What the end of a Parquet file says of its row groups and columns, read without pyarrow.

pyarrow ends the process where what a footer says of a column makes no sense and is asked for from Python. Here it is an error.

The footer is a Thrift structure, ``FileMetaData`` of the Parquet format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from alphastomics._io._untrusted import check_memory
from alphastomics.data.parquet._thrift import read_struct

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from pathlib import Path

MAGIC = b"PAR1"
ROW_GROUPS = 4  # fields of FileMetaData
COLUMNS, N_ROWS = 1, 3  # of RowGroup
ABOUT = 3  # of ColumnChunk
KIND, PATH, CODEC, N_VALUES, STORED, DATA, DICTIONARY = 1, 3, 4, 5, 7, 9, 11  # of ColumnMetaData
WIDTHS = {0: 1, 1: 4, 4: 4}  # bytes of a value in memory, by its type: boolean, int32, float
WIDEST = 8


class Chunk(NamedTuple):
    """What a row group has of a column.

    Attributes
    ----------
    width
        Bytes of a value in memory.
    is_compressed, has_dictionary
        How it is stored.
    n_values
        Number of values, missing ones and empty lists too.
    start, n_bytes
        Where its pages are, but for that of a dictionary, and how long they are.
    """

    width: int
    is_compressed: bool
    has_dictionary: bool
    n_values: int
    start: int
    n_bytes: int


class RowGroup(NamedTuple):
    """Number of rows, and columns by their names."""

    n_rows: int
    columns: dict[str, Chunk]


def read_footer(path: Path) -> tuple[RowGroup, ...]:
    """Row groups of a file.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it makes no sense; the message does not name the file.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        length, magic = int.from_bytes(file.read(4), "little"), file.read(4)
        if magic != MAGIC or length + 8 > size:
            raise ValueError("its end is missing")
        file.seek(size - 8 - length)
        buffer = file.read(length)
    try:
        values, _ = read_struct(buffer)
        return tuple(_row_group(group) for group in values[ROW_GROUPS])
    except (IndexError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError("its end makes no sense") from error


def check_room(footer: tuple[RowGroup, ...], groups: Iterable[int], columns: Container[str] | None = None) -> None:
    """Refuse row groups that are larger than the memory of this machine.

    A value that comes a thousand million times in a row takes a few bytes of a file.

    Parameters
    ----------
    footer
        What the file says of itself.
    groups
        Numbers of the row groups that are read at once.
    columns
        Names of the columns that are read; all when None.

    Raises
    ------
    ValueError
        If they are; the message does not name the file.
    """
    chunks = [
        chunk for group in groups for name, chunk in footer[group].columns.items() if columns is None or name in columns
    ]
    check_memory(sum(chunk.n_values * chunk.width for chunk in chunks))


def _row_group(values: dict[int, Any]) -> RowGroup:
    chunks = {}
    for column in values[COLUMNS]:
        about = column[ABOUT]
        chunks[about[PATH][0].decode()] = Chunk(
            WIDTHS.get(about[KIND], WIDEST),
            about[CODEC] != 0,
            DICTIONARY in about,
            _count(about[N_VALUES]),
            _count(about[DATA]),
            _count(about[STORED]),
        )
    return RowGroup(_count(values[N_ROWS]), chunks)


def _count(value: int) -> int:
    if value < 0:
        raise ValueError("a negative number")
    return value
