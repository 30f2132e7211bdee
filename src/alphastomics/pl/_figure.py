"""Where a plot is drawn, and what becomes of the figure."""

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
    """Return an array of axes of that shape: the caller's, or those of a new figure, with so many inches beside."""
    import matplotlib.pyplot as plt

    if ax is None:
        size = figsize or (PANEL_SIZE * shape[1] + beside, PANEL_SIZE * shape[0])
        return plt.subplots(*shape, figsize=size, dpi=dpi, squeeze=False, layout="constrained")[1]
    given = np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
    if len(given) != shape[0] * shape[1]:
        raise ValueError(f"{shape[0] * shape[1]} panels are to be drawn, but ax holds {len(given)} axes")
    return given.reshape(shape)


def finish(
    axes: np.ndarray[Any, Any], *, given: bool, show: bool | None, save: str | PathLike[str] | None
) -> np.ndarray[Any, Any] | None:
    """Save and show the figure as asked; return the axes unless it was shown."""
    import matplotlib.pyplot as plt

    if save is not None:
        axes.flat[0].figure.figure.savefig(save, bbox_inches="tight")  # the whole figure, not a part of it
    if given:
        return axes
    if _shows() if show is None else show:
        plt.show()
        return None
    return axes


def _shows() -> bool:
    """Whether a figure is shown unasked: as scanpy is set, and never on a backend that only writes files."""
    import matplotlib as mpl

    scanpy = sys.modules.get("scanpy")
    if scanpy is not None and not scanpy.settings.autoshow:
        return False
    return mpl.get_backend().lower() not in FILE_BACKENDS
