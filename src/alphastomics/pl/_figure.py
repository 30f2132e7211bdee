"""Panels of cells with a scale bar and a legend; axes to plot on; saving and showing the figure."""

from __future__ import annotations

import sys
from math import floor, log10
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics._labels import label_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from alphastomics.pl._color import CellColors
    from alphastomics.tl._placed import PlacedSlice

    Positions = NDArray[np.float64]

PANEL_SIZE = 3.6  # inches
LETTER = 0.075  # mean width of a letter of small text, inches
LEGEND_ROWS = 14
KNOWN = "known position"  # in the legend
KNOWN_COLOR = (0.6, 0.6, 0.6, 1.0)
KNOWN_AREA = 0.4  # of a marker, relative to a cell that was placed
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


def choose_slices(pieces: list[PlacedSlice], slices: str | Sequence[str] | None) -> list[PlacedSlice]:
    """The named slices, by default all that have placed cells."""
    if slices is None:
        return [piece for piece in pieces if len(piece.placed)] or pieces
    by_name = {piece.name: piece for piece in pieces}
    names = [slices] if isinstance(slices, str) else [label_name(name) for name in slices]
    for name in names:
        if name not in by_name:
            raise KeyError(f"unknown slice {name!r}; choose slices=… from {', '.join(map(repr, by_name))}")
    if not names:
        raise ValueError("slices=… is empty; pass at least one, or leave it out to plot all")
    return [by_name[name] for name in names]


def panel_titles(title: str | Sequence[str] | None, pieces: list[PlacedSlice], kinds: list[str]) -> list[list[str]]:
    """Titles of the panels, one list for each slice."""
    n = len(pieces) * len(kinds)
    if title is None:
        flat = [f"{piece.name}: {kind}" for piece in pieces for kind in kinds]
    else:
        flat = [title] * n if isinstance(title, str) else list(title)
    if len(flat) != n:
        raise ValueError(f"title has {len(flat)} titles for {n} panels; pass one for each panel, or one for all")
    return [flat[i : i + len(kinds)] for i in range(0, n, len(kinds))]


def marker_size(pieces: list[PlacedSlice]) -> float:
    """Area in points² of markers that cover about half of a panel of 250 x 250 points."""
    return float(np.clip(30_000 / max(1, *(len(piece.cells) for piece in pieces)), 1, 40))


def draw_row(
    axes: np.ndarray[Any, Any],
    panels: list[Positions],
    shades: list[NDArray[np.float64]],
    titles: list[str],
    *,
    piece: PlacedSlice,
    size: float,
    units: str | None,
    **kwargs: Any,
) -> None:
    """Draw the cells of a slice, at ``panels`` (n, n_dims) in ``shades`` (n, 4); cells with a known position are gray, small and below."""
    everything = np.concatenate(panels)[:, :2]
    everything = everything[np.isfinite(everything).all(axis=1)]
    known = ~np.isin(piece.cells, piece.placed)
    order = np.argsort(~known, kind="stable")
    areas = np.where(known, KNOWN_AREA * size, size)
    for ax, positions, rgba, title in zip(axes, panels, shades, titles, strict=True):
        drawn = order[np.isfinite(positions[order]).all(axis=1)]
        colors = np.where(known[:, None], KNOWN_COLOR, rgba)[drawn]
        style = {"linewidths": 0, "rasterized": True} | kwargs
        ax.scatter(*positions[drawn, :2].T, s=areas[drawn], c=colors, **style)
        if len(everything):
            low, high = everything.min(axis=0), everything.max(axis=0)
            margin = 0.05 * float((high - low).max()) or 1.0
            ax.set(xlim=(low[0] - margin, high[0] + margin), ylim=(low[1] - margin, high[1] + margin))
        ax.set(xticks=[], yticks=[], title=title)
        ax.set_aspect("equal", adjustable="box")
    if len(everything):
        _add_scale_bar(axes[0], units)


def round_length(length: float) -> float:
    """The nearest of 1, 2 and 5 times a power of ten, by ratio."""
    power = 10.0 ** floor(log10(length))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda found: abs(log10(found / length)))


def _add_scale_bar(ax: Axes, units: str | None) -> None:
    """Draw a line of a round length, about a fifth of the width, below the left end of the axes."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import ScaledTranslation

    low, high = ax.get_xlim()
    length = round_length((high - low) / 5)
    figure: Any = ax.figure
    below = ax.get_xaxis_transform() + ScaledTranslation(0, -6 / 72, figure.dpi_scale_trans)
    ax.add_artist(Line2D([low, low + length], [0, 0], transform=below, color="0.2", linewidth=2, clip_on=False))
    text = f"{length:,.0f}" if length >= 1 else f"{length:g}"
    text = text if units is None else f"{text} {units}"
    style: dict[str, Any] = {"ha": "left", "va": "top", "fontsize": "small", "annotation_clip": False}
    ax.annotate(text, (low, 0), xycoords=below, xytext=(0, -4), textcoords="offset points", **style)


def legend_of(pieces: list[PlacedSlice], shades: Mapping[str, Any]) -> dict[str, Any]:
    """Colors of categories, and of cells with a known position if there are any."""
    return dict(shades) | ({KNOWN: KNOWN_COLOR} if any(len(p.placed) < len(p.cells) for p in pieces) else {})


def legend_width(legend: Mapping[str, Any], n_rows: int) -> float:
    """Width in inches: a marker and the longest name in each column."""
    return _columns(legend, n_rows) * (0.4 + LETTER * max(map(len, legend), default=0))


def _columns(legend: Mapping[str, Any], n_rows: int) -> int:
    return -(-len(legend) // (LEGEND_ROWS * n_rows))


def add_legend(
    axes: np.ndarray[Any, Any], legend: Mapping[str, Any], title: str | None, *, given: bool, bar: bool
) -> None:
    """Add the legend to the right of the panels; in a figure of the caller, beside the upper right axes and their color bar, if any."""
    from matplotlib.lines import Line2D

    if not legend:
        return
    handles = [
        Line2D([], [], linestyle="", marker="o", markersize=3 if name == KNOWN else 6, color=rgba, label=name)
        for name, rgba in legend.items()
    ]
    style: dict[str, Any] = {
        "handles": handles,
        "title": title if set(legend) - {KNOWN} else None,
        "frameon": False,
        "fontsize": "small",
        "ncols": _columns(legend, len(axes)),
    }
    if given:
        axes[0, -1].legend(loc="upper left", bbox_to_anchor=(1.4 if bar else 1.02, 1), borderaxespad=0, **style)
    else:
        axes[0, 0].figure.legend(loc="outside right upper", **style)


def add_color_bar(axes: np.ndarray[Any, Any], colors: CellColors | None, label: str | None) -> None:
    """Add the color bar of numbers."""
    if colors is not None and colors.mappable is not None:
        axes[0, 0].figure.colorbar(colors.mappable, ax=list(axes.flat), label=label, shrink=0.8)


def held_out_title(scores: Mapping[str, float], width: float) -> str:
    """Scores of the held-out cells of the reference, as lines of at most ``width`` inches; empty without scores."""
    if "distance_spearman" not in scores:
        return ""
    text = f"held-out cells of the reference: distance Spearman {scores['distance_spearman']:.2f}"
    if "knn_preservation" in scores and "knn_preservation_chance" in scores:
        text += f", kNN preservation {scores['knn_preservation']:.2f} (chance {scores['knn_preservation_chance']:.2f})"
    return fill(text, max(20, int(width / LETTER)))
