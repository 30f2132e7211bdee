"""Preprocessing: restore counts, hide positions to evaluate predictions, and convert from and to SpatialData."""

from __future__ import annotations

from alphastomics.pp._counts import restore_counts
from alphastomics.pp._hide import hide_positions
from alphastomics.pp._spatialdata import from_spatialdata, to_spatialdata

__all__ = ["from_spatialdata", "hide_positions", "restore_counts", "to_spatialdata"]
