"""Axes to plot on; saving and showing the figure."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from matplotlib.axes import Axes

PANEL_SIZE = 3.6  # inches
FILE_BACKENDS = {"agg", "cairo", "pdf", "pgf", "ps", "svg", "template"}


def make_axes(
    shape: tuple[int, int],
    ax: Axes | Sequence[Axes] | None,
    *,
    beside: float = 0.0,
    figsize: tuple[float, float] | None = None,
    dpi: float | None = None,
) -> np.ndarray[Any, Any]:
    """Array of axes, of the caller or of a new figure with ``beside`` inches on the right for a legend."""
    import matplotlib.pyplot as plt

    if ax is None:
        size = figsize or (PANEL_SIZE * shape[1] + beside, PANEL_SIZE * shape[0])
        return plt.subplots(*shape, figsize=size, dpi=dpi, squeeze=False, layout="constrained")[1]
    given = np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
    if len(given) != shape[0] * shape[1]:
        raise ValueError(f"ax has {len(given)} axes for {shape[0] * shape[1]} panels; pass one for each panel")
    return given.reshape(shape)


def finish(
    axes: np.ndarray[Any, Any], *, given: bool, show: bool | None, save: str | PathLike[str] | None
) -> np.ndarray[Any, Any] | None:
    """Save and show the figure; return the axes unless it was shown."""
    import matplotlib.pyplot as plt

    if save is not None:
        axes.flat[0].figure.figure.savefig(save, bbox_inches="tight")  # the figure that contains subfigures
    if given:
        return axes
    if _autoshow() if show is None else show:
        plt.show()
        return None
    return axes


def _autoshow() -> bool:
    """Default of ``show``: the setting of scanpy if it is imported, and False for backends without a display."""
    import matplotlib as mpl

    scanpy = sys.modules.get("scanpy")
    if scanpy is not None and not scanpy.settings.autoshow:
        return False
    return mpl.get_backend().lower() not in FILE_BACKENDS
