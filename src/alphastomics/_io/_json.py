"""Strict JSON of limited size, and values as its types."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 2**26  # the configuration of a model of 300,000 genes


def read(path: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """Read a file of at most ``max_bytes``.

    The message of a ``ValueError`` (not JSON, or too large) does not name the file.
    """
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes:,} bytes")
    return parse(data.decode("utf-8"))


def parse(text: str) -> Any:
    """Parse a text; NaN, infinity and keys that occur twice are errors."""
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_reject, parse_float=_finite, parse_int=_integer
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key occurs twice in one object")
    return values


def _reject(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} exceeds double precision")
    return number


def _integer(text: str) -> int:
    if not -(2**63) <= (number := int(text)) < 2**64:
        raise ValueError(f"{text[:20]} exceeds 64 bits")
    return number


def to_plain(value: Any) -> Any:
    """Nested values as JSON types: arrays and tuples as lists, numpy numbers as numbers, NaN and infinity as None."""
    if isinstance(value, dict):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(entry) for entry in value]
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, np.generic):
        return to_plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
