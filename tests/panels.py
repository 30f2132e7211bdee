"""What a panel of a plot shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def points(ax: Axes) -> np.ndarray:
    """Positions of the cells."""
    (scatter,) = ax.collections
    return np.asarray(scatter.get_offsets())


def colors(ax: Axes) -> np.ndarray:
    """Colors of the cells."""
    (scatter,) = ax.collections
    return np.asarray(scatter.get_facecolors())
