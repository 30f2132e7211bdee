"""Checks of arguments; errors name the argument and the remedy."""

from __future__ import annotations

from numbers import Real
from os import PathLike
from typing import Any


def check_model(model: object) -> None:
    """Raise an error for an object that is no model."""
    from alphastomics.model import AlphaSTomics

    if isinstance(model, (str, PathLike)):
        raise TypeError(
            f"model={str(model)!r} is a path; load the model first, with alphastomics.model.AlphaSTomics.load({str(model)!r})"
        )
    if not isinstance(model, AlphaSTomics):
        raise TypeError(f"model is of the class {type(model).__name__}; pass a trained AlphaSTomics as model=…")


def check_share(argument: str, value: Any) -> None:
    """Raise an error for a number that is not between 0 and 1."""
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise ValueError(f"{argument}={value!r} must be between 0 and 1; pass another number")
