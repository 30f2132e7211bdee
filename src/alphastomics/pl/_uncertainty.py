"""Predicted positions, colored by their uncertainty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics._keys import RECONSTRUCTED, UNCERTAINTY_SUFFIX
from alphastomics.pl._color import numeric_colors
from alphastomics.pl._figure import (
    add_color_bar,
    add_legend,
    choose_slices,
    draw_row,
    finish,
    legend_of,
    legend_width,
    make_axes,
    marker_size,
    panel_titles,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from anndata import AnnData
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap


def uncertainty(
    adata: AnnData,
    *,
    prediction: str = RECONSTRUCTED,
    library_key: str | None = None,
    slices: str | Sequence[str] | None = None,
    cmap: str | Colormap | None = None,
    size: float | None = None,
    units: str | None = None,
    title: str | Sequence[str] | None = None,
    ax: Axes | Sequence[Axes] | None = None,
    figsize: tuple[float, float] | None = None,
    dpi: float | None = None,
    show: bool | None = None,
    save: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> np.ndarray[Any, Any] | None:
    """Plot the predicted positions of each slice, colored by their uncertainty.

    Cells with a known position (``obs[prediction + "_placed"]`` is False) are small and gray. Each panel has equal aspect and a scale bar.
    In 3D, the first two dimensions are plotted. Cells without a finite position are left out.

    Parameters
    ----------
    adata
        Cells with predicted positions and ``obs[prediction + "_uncertainty"]``, in units of the positions.
    prediction
        Key of ``obsm`` with the predicted positions, (n_cells, n_dims).
    library_key
        Column of ``obs`` with the slice of each cell. By default as in :func:`alphastomics.tl.evaluate`.
    slices
        Slices to plot, one per row. By default all slices with placed cells.
    cmap
        Color map, whose range is set by ``vmin`` and ``vmax``; by default from 0 to the largest uncertainty.
    size
        Area of a marker in points². By default it decreases with the number of cells.
    units
        Units of the positions, for the labels of the scale bar and the color bar.
    title
        Titles of the panels, or one title for all.
    ax
        Axes to plot on, one for each slice.
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
    The axes, (n_slices, 1); None if the figure was shown.

    Raises
    ------
    KeyError
        If a key, a slice or the uncertainty is missing.
    ValueError
        If the number of axes or titles is wrong.

    Examples
    --------
    >>> asx.tl.reconstruct(query, reference, n_samples=8)
    >>> asx.pl.uncertainty(query, units="µm")
    """
    from alphastomics.tl._placed import read_slices
    from alphastomics.tl._tables import read_coordinates

    predicted = read_coordinates(adata, prediction, "prediction")
    key = f"{prediction}{UNCERTAINTY_SUFFIX}"
    if key not in adata.obs:
        raise KeyError(f'obs["{key}"] is missing; pass n_samples=8 to alphastomics.tl.reconstruct')
    pieces = choose_slices(read_slices(adata, prediction, library_key), slices)
    titles = panel_titles(title, pieces, ["uncertainty"])
    values = adata.obs[key].to_numpy(dtype=np.float64, na_value=np.nan)
    colors = numeric_colors(values, cmap, kwargs.pop("vmin", 0.0), kwargs.pop("vmax", None))
    legend = legend_of(pieces, {})
    beside = legend_width(legend, len(pieces))
    axes = make_axes((len(pieces), 1), ax, figsize=figsize, dpi=dpi, beside=beside)
    style = {"size": marker_size(pieces) if size is None else size, "units": units} | kwargs
    for row, piece in enumerate(pieces):
        draw_row(axes[row], [predicted[piece.cells]], [colors.rgba[piece.cells]], titles[row], piece=piece, **style)
    add_legend(axes, legend, None, given=ax is not None, bar=True)
    add_color_bar(axes, colors, "uncertainty" if units is None else f"uncertainty ({units})")
    return finish(axes, given=ax is not None, show=show, save=save)
