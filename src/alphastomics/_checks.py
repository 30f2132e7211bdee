"""Checks of seeds of random numbers, and of counts."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def check_seed(seed: Any, argument: str = "random_state") -> int:
    """The seed as an integer.

    Raises
    ------
    ValueError
        If it is not a whole number at least 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise ValueError(f"{argument}={seed!r} must be a whole number at least 0; pass another seed")
    return int(seed)


def check_counts(**counts: Any) -> None:
    """Raise an error for a number that is not whole, or less than 1; names are those of the arguments."""
    for name, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name}={count!r} must be a whole number at least 1; pass another number")
