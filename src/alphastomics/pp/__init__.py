"""Preprocessing: hide what is to be predicted, and bring tissues in and out."""

from __future__ import annotations

from alphastomics.pp._hide import hide_positions
from alphastomics.pp._spatialdata import from_spatialdata, to_spatialdata

__all__ = ["from_spatialdata", "hide_positions", "to_spatialdata"]
