"""True and predicted positions side by side."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics._keys import RECONSTRUCTED, SPATIAL
from alphastomics.pl._color import CellColors, position_colors, value_colors
from alphastomics.pl._figure import finish, make_axes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from numpy.typing import NDArray

    from alphastomics.tl._placed import PlacedSlice

    Positions = NDArray[np.float64]

logger = logging.getLogger(__name__)

LEGEND_ROWS = 14


def reconstruction(
    adata: AnnData,
    *,
    truth: str | None = SPATIAL,
    prediction: str = RECONSTRUCTED,
    color: str | None = None,
    library_key: str | None = None,
    slices: str | Sequence[str] | None = None,
    cmap: str | Colormap | None = None,
    palette: str | Sequence[Any] | Mapping[str, Any] | None = None,
    size: float | None = None,
    title: str | Sequence[str] | None = None,
    ax: Axes | Sequence[Axes] | None = None,
    figsize: tuple[float, float] | None = None,
    dpi: float | None = None,
    show: bool | None = None,
    save: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> np.ndarray[Any, Any] | None:
    """Plot true and predicted positions of each slice side by side.

    A cell has the same color in both panels, by default a color that encodes its true position. The prediction is aligned
    with the truth by a rotation, reflection and translation, except in slices with known positions (cells for which
    ``obs[prediction + "_placed"]`` is False), where the frames agree. Both panels have the same limits and equal aspect. In
    3D, positions are aligned in all dimensions and plotted in the first two. Cells without a finite position are left out.

    Parameters
    ----------
    adata
        Cells with predicted positions.
    truth
        Key of ``obsm`` with the true positions, (n_cells, n_dims). If None, or if the default key does not exist, only the
        prediction is plotted.
    prediction
        Key of ``obsm`` with the predicted positions, (n_cells, n_dims).
    color
        Column of ``obs``, or a gene in ``var_names``, whose expression is read from ``X``. By default cells are colored by the
        first two coordinates of their true position, and are gray without one.
    library_key
        Column of ``obs`` with the slice of each cell. By default as in :func:`alphastomics.tl.evaluate`.
    slices
        Slices to plot, one per row. All slices by default.
    cmap
        Color map of numbers, whose range is set by ``vmin`` and ``vmax``.
    palette
        Colors of categories: a color map, a list in the order of the categories, or a dict. By default
        ``uns[color + "_colors"]``.
    size
        Area of a marker in points². By default it decreases with the number of cells.
    title
        Titles of the panels, row by row, or one title for all.
    ax
        Axes to plot on, row by row: truth, prediction, truth, …
    figsize
        Width and height of a new figure in inches.
    dpi
        Resolution of a new figure.
    show
        Show the figure. By default ``scanpy.settings.autoshow`` if the backend can display figures; never if `ax` is given.
    save
        File to save the figure to.
    **kwargs
        Passed to :meth:`matplotlib.axes.Axes.scatter`.

    Returns
    -------
    The axes, (n_slices, 2), or (n_slices, 1) without truth; None if the figure was shown.

    Raises
    ------
    KeyError
        If a key, a slice or the color is missing.
    ValueError
        If true and predicted positions differ in dimension, or the number of axes, titles or colors is wrong.
    """
    from alphastomics.tl._placed import read_slices

    true, predicted = _read(adata, truth, prediction)
    pieces = _choose(read_slices(adata, prediction, library_key), slices)
    limits = {"vmin": kwargs.pop("vmin", None), "vmax": kwargs.pop("vmax", None)}
    values = value_colors(adata, color, cmap=cmap, palette=palette, **limits) if color is not None else None
    kinds = ["prediction"] if true is None else ["truth", "prediction"]
    titles = _titles(title, pieces, kinds)
    legend = _legend(values, pieces)
    # Width of a legend column: a marker, and 0.075 inches per letter of the longest name.
    beside = _columns(legend, len(pieces)) * (0.4 + 0.075 * max(map(len, legend), default=0))
    axes = make_axes((len(pieces), len(kinds)), ax, figsize=figsize, dpi=dpi, beside=beside)
    if size is None:
        # Markers cover about half of a panel of 250 x 250 points.
        size = float(np.clip(30_000 / max(1, *(len(piece.cells) for piece in pieces)), 1, 40))
    for row, piece in enumerate(pieces):
        panels = _panels(piece, true, predicted)
        reference = panels[0] if true is not None else np.full_like(panels[0], np.nan)
        rgba = position_colors(reference) if values is None else values.rgba[piece.cells]
        _draw_row(axes[row], panels, rgba, titles[row], s=size, **kwargs)
    if legend:
        _add_legend(axes, legend, color, given=ax is not None)
    if values is not None and values.mappable is not None:
        axes[0, 0].figure.colorbar(values.mappable, ax=list(axes.flat), label=color, shrink=0.8)
    return finish(axes, given=ax is not None, show=show, save=save)


def _read(adata: AnnData, truth: str | None, prediction: str) -> tuple[Positions | None, Positions]:
    from alphastomics.tl._placed import check_same_dims
    from alphastomics.tl._tables import read_coordinates

    predicted = read_coordinates(adata, prediction, "prediction")
    if truth is None or (truth == SPATIAL and truth not in adata.obsm):
        logger.info("Only the prediction is plotted, without true positions.")
        return None, predicted
    true = read_coordinates(adata, truth, "truth")
    check_same_dims(true, predicted, truth, prediction)
    return true, predicted


def _choose(pieces: list[PlacedSlice], slices: str | Sequence[str] | None) -> list[PlacedSlice]:
    if slices is None:
        return pieces
    by_name = {piece.name: piece for piece in pieces}
    names = [slices] if isinstance(slices, str) else list(slices)
    for name in names:
        if name not in by_name:
            raise KeyError(f"unknown slice {name!r}; choose slices=… from {', '.join(map(repr, by_name))}")
    if not names:
        raise ValueError("slices=… is empty; pass at least one, or leave it out to plot all")
    return [by_name[name] for name in names]


def _titles(title: str | Sequence[str] | None, pieces: list[PlacedSlice], kinds: list[str]) -> list[list[str]]:
    n = len(pieces) * len(kinds)
    if title is None:
        flat = [f"{piece.name}: {kind}" for piece in pieces for kind in kinds]
    else:
        flat = [title] * n if isinstance(title, str) else list(title)
    if len(flat) != n:
        raise ValueError(f"title has {len(flat)} titles for {n} panels; pass one for each panel, or one for all")
    return [flat[i : i + len(kinds)] for i in range(0, n, len(kinds))]


def _panels(piece: PlacedSlice, true: Positions | None, predicted: Positions) -> list[Positions]:
    """Positions in each panel of a slice, (n, n_dims), the prediction aligned with the truth."""
    from alphastomics.metrics import rigid_align

    moved = predicted[piece.cells]
    if true is None:
        return [moved]
    target = true[piece.cells]
    both = np.isfinite(target).all(axis=1) & np.isfinite(moved).all(axis=1)
    if piece.free and both.any():
        moved = rigid_align(moved[both], target[both])[1].apply(moved)
    return [target, moved]


def _draw_row(
    axes: np.ndarray[Any, Any], panels: list[Positions], rgba: NDArray[np.float64], titles: list[str], **kwargs: Any
) -> None:
    everything = np.concatenate(panels)[:, :2]
    everything = everything[np.isfinite(everything).all(axis=1)]
    for ax, positions, title in zip(axes, panels, titles, strict=True):
        drawn = np.isfinite(positions).all(axis=1)
        ax.scatter(*positions[drawn, :2].T, c=rgba[drawn], **{"linewidths": 0, "rasterized": True} | kwargs)
        if len(everything):
            low, high = everything.min(axis=0), everything.max(axis=0)
            margin = 0.05 * float((high - low).max()) or 1.0
            ax.set(xlim=(low[0] - margin, high[0] + margin), ylim=(low[1] - margin, high[1] + margin))
        ax.set(xticks=[], yticks=[], title=title)
        ax.set_aspect("equal", adjustable="box")


def _legend(colors: CellColors | None, pieces: list[PlacedSlice]) -> dict[str, Any]:
    """Color of each category in the plotted slices."""
    if colors is None or colors.labels is None:
        return {}
    present = set(colors.labels[np.concatenate([piece.cells for piece in pieces])])
    return {name: shade for name, shade in colors.legend.items() if name in present}


def _columns(legend: Mapping[str, Any], n_rows: int) -> int:
    return -(-len(legend) // (LEGEND_ROWS * n_rows))


def _add_legend(axes: np.ndarray[Any, Any], legend: Mapping[str, Any], color: str | None, *, given: bool) -> None:
    """Add the legend to the right of the panels; in a figure of the caller, to the upper right axes."""
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {
        "handles": [Line2D([], [], linestyle="", marker="o", color=rgba, label=name) for name, rgba in legend.items()],
        "title": color,
        "frameon": False,
        "fontsize": "small",
        "ncols": _columns(legend, len(axes)),
    }
    if given:
        axes[0, -1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0, **style)
    else:
        axes[0, 0].figure.legend(loc="outside right upper", **style)
