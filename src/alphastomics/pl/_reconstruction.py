"""True and predicted positions side by side, and the confidence of each cell."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics._keys import CONFIDENCE_SUFFIX, RECONSTRUCTED, SPATIAL
from alphastomics.pl._color import CellColors, position_colors, value_colors
from alphastomics.pl._figure import (
    add_color_bar,
    add_legend,
    choose_slices,
    draw_row,
    finish,
    held_out_title,
    legend_of,
    legend_width,
    make_axes,
    marker_size,
    panel_titles,
)

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

ALIGNED = "aligned to the truth by a rigid map"
PLACED_COLOR = (0.12, 0.47, 0.71, 1.0)  # of cells without a true position, beside gray cells with a known one


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
    confidence: bool = True,
    units: str | None = None,
    title: str | Sequence[str] | None = None,
    ax: Axes | Sequence[Axes] | None = None,
    figsize: tuple[float, float] | None = None,
    dpi: float | None = None,
    show: bool | None = None,
    save: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> np.ndarray[Any, Any] | None:
    """Plot true and predicted positions of each slice side by side, and the confidence of each cell.

    A cell has the same color in the first two panels, by default a color that encodes its true position. The prediction is aligned
    with the truth by a rotation, reflection and translation, as a note below it states, except in slices with known positions (cells for
    which ``obs[prediction + "_placed"]`` is False), where the frames agree. Cells with a known position are small and gray. All
    panels of a slice have the same limits and equal aspect, and the first has a scale bar. In 3D, positions are aligned in all dimensions
    and plotted in the first two. Cells without a finite position are left out. The title of a new figure has the scores of held-out
    cells of the reference, if ``uns[prediction]`` records them.

    Parameters
    ----------
    adata
        Cells with predicted positions.
    truth
        Key of ``obsm`` with the true positions, (n_cells, n_dims). If None, or if the default key does not exist or has no position of
        a placed cell, the truth is not plotted.
    prediction
        Key of ``obsm`` with the predicted positions, (n_cells, n_dims).
    color
        Column of ``obs``, or a gene in ``var_names``, whose expression is read from ``X``. By default cells are colored by the
        first two coordinates of their true position, and are gray without one, or blue in slices with known positions.
    library_key
        Column of ``obs`` with the slice of each cell. By default as in :func:`alphastomics.tl.evaluate`.
    slices
        Slices to plot, one per row. By default all slices with placed cells.
    cmap
        Color map of numbers, whose range is set by ``vmin`` and ``vmax``.
    palette
        Colors of categories: a color map, a list in the order of the categories, or a dict. By default
        ``uns[color + "_colors"]``.
    size
        Area of a marker in points². By default it decreases with the number of cells.
    confidence
        Add a panel of the predicted positions, colored by ``obs[prediction + "_confidence"]`` from 0 to 1, if there is such a column.
    units
        Units of the positions, for the label of the scale bar.
    title
        Titles of the panels, row by row, or one title for all.
    ax
        Axes to plot on, row by row: truth, prediction, confidence, truth, …
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
    The axes, (n_slices, n_panels), where truth and confidence are panels only if they are plotted; None if the figure was shown.

    Raises
    ------
    KeyError
        If a key, a slice or the color is missing.
    ValueError
        If true and predicted positions differ in dimension, or the number of axes, titles or colors is wrong.

    Examples
    --------
    >>> asx.tl.reconstruct(query, model=model)
    >>> asx.pl.reconstruction(query, color="cell_type", units="µm", save="reconstruction.png")
    """
    from alphastomics.tl._placed import read_slices, recorded

    everything = read_slices(adata, prediction, library_key)
    true, predicted = _read(adata, truth, prediction, everything)
    pieces = choose_slices(everything, slices)
    if truth == SPATIAL and true is not None and not _any_finite(true, pieces):
        true = None
    limits = {"vmin": kwargs.pop("vmin", None), "vmax": kwargs.pop("vmax", None)}
    values = value_colors(adata, color, cmap=cmap, palette=palette, **limits) if color is not None else None
    key = f"{prediction}{CONFIDENCE_SUFFIX}"
    confidence_colors = value_colors(adata, key, vmin=0, vmax=1) if confidence and key in adata.obs else None
    kinds = ["truth"] * (true is not None) + ["prediction"] + ["confidence"] * (confidence_colors is not None)
    titles = panel_titles(title, pieces, kinds)
    legend = legend_of(pieces, _categories(values, pieces))
    beside = legend_width(legend, len(pieces))
    axes = make_axes((len(pieces), len(kinds)), ax, figsize=figsize, dpi=dpi, beside=beside)
    style = {"size": marker_size(pieces) if size is None else size, "units": units} | kwargs
    for row, piece in enumerate(pieces):
        panels, aligned = _panels(piece, true, predicted)
        shades = [_shade(piece, values, true)] * len(panels)
        if aligned:
            axes[row, 1].set_xlabel(ALIGNED, fontsize="small")
        if confidence_colors is not None:
            panels, shades = [*panels, panels[-1]], [*shades, confidence_colors.rgba[piece.cells]]
        draw_row(axes[row], panels, shades, titles[row], piece=piece, **style)
    bar = confidence_colors is not None or (values is not None and values.mappable is not None)
    add_legend(axes, legend, color, given=ax is not None, bar=bar)
    n_colored = len(kinds) - (confidence_colors is not None)
    add_color_bar(axes[:, :n_colored], values, color)
    add_color_bar(axes[:, n_colored:], confidence_colors, "confidence")
    if ax is None:
        _add_score(axes[0, 0].figure, recorded(adata, prediction, "training"))
    return finish(axes, given=ax is not None, show=show, save=save)


def _read(
    adata: AnnData, truth: str | None, prediction: str, slices: list[PlacedSlice]
) -> tuple[Positions | None, Positions]:
    """True and predicted positions, (n_cells, n_dims) each."""
    from alphastomics.tl._placed import PositionPair
    from alphastomics.tl._tables import read_coordinates

    if truth is None or (truth == SPATIAL and truth not in adata.obsm):
        logger.info("The prediction is plotted without true positions.")
        return None, read_coordinates(adata, prediction, "prediction")
    pair = PositionPair.read(adata, truth, prediction, argument="truth").in_equal_dims(slices)
    return pair.true, pair.predicted


def _any_finite(true: Positions, pieces: list[PlacedSlice]) -> bool:
    """Whether the true position of a placed cell is finite."""
    return any(bool(np.isfinite(true[piece.placed]).all(axis=1).any()) for piece in pieces)


def _panels(piece: PlacedSlice, true: Positions | None, predicted: Positions) -> tuple[list[Positions], bool]:
    """Positions (n, n_dims) in the panels of truth and prediction, and whether the prediction was aligned with the truth."""
    from alphastomics.metrics import rigid_align

    moved = predicted[piece.cells]
    if true is None:
        return [moved], False
    target = true[piece.cells]
    both = np.isfinite(target).all(axis=1) & np.isfinite(moved).all(axis=1)
    if not piece.free or not both.any():
        return [target, moved], False
    return [target, rigid_align(moved[both], target[both])[1].apply(moved)], True


def _shade(piece: PlacedSlice, values: CellColors | None, true: Positions | None) -> NDArray[np.float64]:
    """Colors of the cells of a slice, (n, 4)."""
    if values is not None:
        return values.rgba[piece.cells]
    if not piece.free and (true is None or not _any_finite(true, [piece])):
        return np.tile(PLACED_COLOR, (len(piece.cells), 1))
    return position_colors(np.full((len(piece.cells), 2), np.nan) if true is None else true[piece.cells])


def _categories(colors: CellColors | None, pieces: list[PlacedSlice]) -> dict[str, Any]:
    """Color of each category of the placed cells in the plotted slices."""
    if colors is None or colors.labels is None:
        return {}
    present = set(colors.labels[np.concatenate([piece.placed for piece in pieces])])
    return {name: shade for name, shade in colors.legend.items() if name in present}


def _add_score(figure: Any, training: Mapping[str, Any]) -> None:
    """Add the scores of the held-out cells of the reference as the title."""
    if text := held_out_title(training.get("held_out", {}), figure.get_figwidth()):
        figure.suptitle(text, fontsize="small")
