"""Colors of cells by true position, by a column of ``obs``, or by the expression of a gene."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

if TYPE_CHECKING:
    from anndata import AnnData
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Colormap
    from numpy.typing import NDArray

MISSING = (0.83, 0.83, 0.83, 1.0)  # light gray, as in scanpy
# Colors of the corners of the bounding box, (x, y) low or high; colors inside are interpolated.
CORNERS = {(0, 0): "#2b4c9b", (1, 0): "#d7433b", (0, 1): "#1fa187", (1, 1): "#f4c430"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CellColors:
    """Colors of all cells, and their legend or color bar.

    Parameters
    ----------
    rgba
        Red, green, blue and opacity, (n_cells, 4).
    labels
        Category of each cell, (n_cells,), or None for numbers.
    legend
        Color of each category.
    mappable
        Color scale of numbers, or None for categories.
    """

    rgba: NDArray[np.float64]
    labels: NDArray[np.object_] | None = None
    legend: dict[str, Any] = field(default_factory=dict)
    mappable: ScalarMappable | None = None


def position_colors(positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """Colors by position in the bounding box of all cells, (n_cells, 4); gray for non-finite positions."""
    from matplotlib.colors import to_rgba

    rgba = np.tile(np.asarray(MISSING), (len(positions), 1))
    known = np.isfinite(positions[:, :2]).all(axis=1)
    if not known.any():
        return rgba
    xy = positions[known, :2]
    low, span = xy.min(axis=0), np.ptp(xy, axis=0)
    unit = np.divide(xy - low, span, out=np.full_like(xy, 0.5), where=span > 0)
    rgba[known] = 0
    for corner, color in CORNERS.items():
        share = np.where(corner, unit, 1 - unit).prod(axis=1)
        rgba[known] += share[:, None] * np.asarray(to_rgba(color))
    return rgba.clip(0, 1)  # weights may exceed 1 by rounding errors


def value_colors(
    adata: AnnData,
    color: str,
    *,
    cmap: str | Colormap | None = None,
    palette: str | Sequence[Any] | Mapping[str, Any] | None = None,
    vmin: float | None = None,
    vmax: float | None = None,
) -> CellColors:
    """Colors by a column of ``obs`` or by the expression of a gene in ``X``."""
    values = _values(adata, color)
    if pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
        return numeric_colors(values.to_numpy(dtype=np.float64, na_value=np.nan), cmap, vmin, vmax)
    return _categorical(adata, color, values.astype("category"), palette)


def _values(adata: AnnData, color: str) -> pd.Series[Any]:
    if color in adata.obs:
        return adata.obs[color]
    if color in adata.var_names and adata.X is not None:
        if (adata.var_names == color).sum() > 1:
            raise ValueError(f"color={color!r} is the name of several genes; call adata.var_names_make_unique()")
        column = adata[:, color].X
        dense = column.toarray() if hasattr(column, "toarray") else np.asarray(column)
        return pd.Series(dense.ravel(), index=adata.obs_names)
    raise KeyError(f"color={color!r} is neither a column of obs nor a gene in var_names; pass one of them")


def numeric_colors(
    values: NDArray[np.float64], cmap: str | Colormap | None, vmin: float | None, vmax: float | None
) -> CellColors:
    """Colors of numbers (n_cells,), by default from the smallest to the largest; gray for non-finite numbers."""
    import matplotlib.pyplot as plt
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    finite = values[np.isfinite(values)]
    lowest, highest = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    norm = Normalize(lowest if vmin is None else vmin, highest if vmax is None else vmax)
    mappable = ScalarMappable(norm=norm, cmap=plt.get_cmap(cmap))
    rgba = np.tile(np.asarray(MISSING), (len(values), 1))
    rgba[np.isfinite(values)] = mappable.to_rgba(finite)
    return CellColors(rgba=rgba, mappable=mappable)


def _categorical(
    adata: AnnData, color: str, values: pd.Series[Any], palette: str | Sequence[Any] | Mapping[str, Any] | None
) -> CellColors:
    from matplotlib.colors import to_rgba

    names = [str(name) for name in values.cat.categories]
    if palette is None:
        palette = list(adata.uns.get(f"{color}_colors", ()))
        if len(palette) < len(names):
            palette = default_palette(len(names))
    legend = dict(zip(names, _palette(palette, names, color), strict=True))
    table = np.asarray([to_rgba(legend[name]) for name in names] + [MISSING])
    codes = values.cat.codes.to_numpy()  # -1, the last row, for missing values
    labels = np.asarray([*names, None], dtype=object)[codes]
    return CellColors(rgba=table[codes], labels=labels, legend=legend)


def _palette(palette: str | Sequence[Any] | Mapping[str, Any], names: list[str], color: str) -> list[Any]:
    import matplotlib.pyplot as plt

    if isinstance(palette, str):
        colormap = plt.get_cmap(palette)
        # Qualitative maps are lists of colors; others are sampled evenly.
        if colormap.N < 256:
            return [colormap(i % colormap.N) for i in range(len(names))]
        return list(colormap(np.linspace(0, 1, len(names))))
    if isinstance(palette, Mapping):
        palette = {str(name): value for name, value in palette.items()}
        absent = [name for name in names if name not in palette]
        if absent:
            raise ValueError(f'palette has no color for {", ".join(map(repr, absent))} of obs["{color}"]')
        return [palette[name] for name in names]
    if len(palette) < len(names):
        raise ValueError(f'palette has {len(palette)} colors for the {len(names)} categories of obs["{color}"]')
    return list(palette[: len(names)])


def default_palette(n: int) -> list[Any]:
    """N distinct colors from matplotlib's qualitative maps, or from turbo if there are too few."""
    import matplotlib as mpl

    if n <= 10:
        return list(mpl.colormaps["tab10"](range(n)))
    distinct = [color for name in ("tab20", "tab20b", "tab20c") for color in mpl.colormaps[name](range(20))]
    return distinct[:n] if n <= len(distinct) else list(mpl.colormaps["turbo"](np.linspace(0, 1, n)))
