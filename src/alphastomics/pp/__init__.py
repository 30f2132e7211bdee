"""Preprocessing: hide what is to be predicted."""

from __future__ import annotations

from alphastomics.pp._hide import hide_positions

__all__ = ["hide_positions"]
