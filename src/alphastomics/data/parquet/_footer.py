"""What the end of a Parquet file says of its row groups and columns, read without pyarrow.

pyarrow ends the process where what a footer says of a column makes no sense and is asked for from Python. Here it is an error.

The footer is a Thrift structure in compact protocol (``FileMetaData`` of the Parquet format): every field begins with a byte,
distance to the last field number and type; numbers are zigzag varints, lists begin with their length and the type of what is in
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from alphastomics._disk import check_memory

if TYPE_CHECKING:
    from collections.abc import Container, Iterable
    from pathlib import Path

MAGIC = b"PAR1"
DEEPEST = 32
TRUE, FALSE, BYTE, INTEGERS, DOUBLE, BINARY, LISTS, MAP, STRUCT = 1, 2, 3, (4, 5, 6), 7, 8, (9, 10), 11, 12
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
        values, _ = _read_struct(buffer, 0, 0)
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


def _read_struct(buffer: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Fields of a structure by number, and where it ends."""
    if depth > DEEPEST:
        raise ValueError("it is nested too deeply")
    fields: dict[int, Any] = {}
    number = 0
    while head := buffer[at]:
        distance, kind = divmod(head, 16)
        at += 1
        if distance:
            number += distance
        else:
            number, at = _read_integer(buffer, at)
        if kind in (TRUE, FALSE):
            fields[number] = kind == TRUE
        else:
            fields[number], at = _read(buffer, at, kind, depth + 1)
    return fields, at + 1


def _read(buffer: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    """A value, and where it ends."""
    if kind in INTEGERS:
        return _read_integer(buffer, at)
    if kind == STRUCT:
        return _read_struct(buffer, at, depth)
    if kind == BINARY:
        length, at = _read_varint(buffer, at)
        return buffer[at : at + length], _within(buffer, at + length)
    if kind in LISTS:
        return _read_list(buffer, at, depth)
    if kind in (TRUE, FALSE, BYTE):  # in lists; a field says by its type which of both it is
        return buffer[at], at + 1
    if kind == DOUBLE:
        return None, _within(buffer, at + 8)
    if kind == MAP:
        return _read_map(buffer, at, depth)
    raise ValueError("a type that there is not")


def _read_list(buffer: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    length, kind = divmod(buffer[at], 16)
    at += 1
    if length == 15:
        length, at = _read_varint(buffer, at)
    values = []
    for _ in range(length):
        value, at = _read(buffer, at, kind, depth + 1)
        values.append(value)
    return values, at


def _read_map(buffer: bytes, at: int, depth: int) -> tuple[None, int]:
    length, at = _read_varint(buffer, at)
    kinds = divmod(buffer[at], 16) if length else (0, 0)
    at += bool(length)
    for _ in range(length):
        for kind in kinds:
            _, at = _read(buffer, at, kind, depth + 1)
    return None, at


def _within(buffer: bytes, at: int) -> int:
    if at > len(buffer):
        raise IndexError("it ends before its values do")
    return at


def _read_varint(buffer: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = buffer[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _read_integer(buffer: bytes, at: int) -> tuple[int, int]:
    value, at = _read_varint(buffer, at)
    return (value >> 1) ^ -(value & 1), at
