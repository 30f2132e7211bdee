"""Structures of Thrift in compact protocol, as they are in Parquet files: what says where everything is.

Every field begins with a byte, distance to the last field number and type; numbers are zigzag varints, lists begin with their
length and the type of what is in them.
"""

from __future__ import annotations

from typing import Any

DEEPEST = 32
TRUE, FALSE, BYTE, INTEGERS, DOUBLE, BINARY, LISTS, MAP, STRUCT = 1, 2, 3, (4, 5, 6), 7, 8, (9, 10), 11, 12


def read_struct(buffer: bytes, at: int = 0, depth: int = 0) -> tuple[dict[int, Any], int]:
    """Fields of a structure by number, and where it ends.

    Raises
    ------
    IndexError, ValueError
        If there is none.
    """
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
        return read_struct(buffer, at, depth)
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
