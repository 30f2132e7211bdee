"""JSON that anyone may have written: strict, every key once, and no larger in memory than what we write ourselves."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

LARGEST = 2**26  # bytes: a configuration of 300,000 genes
PER_CONTAINER = 64  # bytes of the largest text for each list or object: an empty one takes as many from two
LONGEST_INTEGER = 20  # characters of one in 64 bits


def read(path: Path, *, largest: int = LARGEST) -> Any:
    """Values of a file.

    Parameters
    ----------
    path
        The file.
    largest
        Most bytes that it may have.

    Raises
    ------
    OSError
        If it cannot be read.
    ValueError
        If it is no JSON, or too large; the message says why, and whoever asks knows which file and what to do.
    """
    with path.open("rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise ValueError(f"it is too large, more than {largest:,} bytes")
    return parse(data.decode("utf-8"), largest=largest)


def parse(text: str, *, largest: int = LARGEST) -> Any:
    """Values of a text; see :func:`read`."""
    if len(text) > largest:
        raise ValueError(f"it is too large, more than {largest:,} characters")
    if text.count("[") + text.count("{") > largest // PER_CONTAINER:
        raise ValueError(f"it has more than {largest // PER_CONTAINER:,} lists and objects")
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite, parse_int=_whole
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; which of two values counts is for nobody to guess."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("it has a key twice in one object")
    return values


def _no_number(name: str) -> float:
    raise ValueError(f"it has {name}, which is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("it has a number that is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > LONGEST_INTEGER or not -(2**63) <= (number := int(text)) < 2**64:
        raise ValueError("it has a whole number of more than 64 bits")
    return number
