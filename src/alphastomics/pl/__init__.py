"""Plots. Matplotlib is imported when the first one is drawn."""

from __future__ import annotations

from ._history import history
from ._reconstruction import reconstruction

__all__ = ["history", "reconstruction"]
