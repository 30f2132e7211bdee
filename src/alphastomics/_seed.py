"""Seeds of random numbers."""

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
