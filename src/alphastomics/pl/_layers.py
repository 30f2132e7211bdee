"""Plots of attention gates, sinks and maps, and of expert usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics import _keys
from alphastomics.pl._figure import finish, make_axes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    import pandas as pd
    from anndata import AnnData
    from matplotlib.axes import Axes

USUAL_GATES = (0.3, 0.7)  # mean of the gates


def attention_gates(
    adata: AnnData,
    *,
    key: str = _keys.GATES,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> Axes | None:
    """Plot mean and standard deviation of the attention gates by layer and head.

    The shaded band, 0.5 ± 0.2, is the usual range of the mean.

    Parameters
    ----------
    adata
        AnnData after :func:`alphastomics.tl.attention_gates`.
    key
        ``key_added`` of :func:`alphastomics.tl.attention_gates`.
    ax
        Axes to plot on.
    show
        Show the figure. By default ``scanpy.settings.autoshow`` if the backend can display figures; never if `ax` is given.
    save
        File to save the figure to.
    **kwargs
        Passed to :meth:`matplotlib.axes.Axes.errorbar`.

    Returns
    -------
    The axes; None if the figure was shown.

    Raises
    ------
    KeyError
        If the key is missing.

    Examples
    --------
    >>> asx.tl.attention_gates(model, query)
    >>> asx.pl.attention_gates(query)
    """
    table = _summary(adata, key, "attention_gates")
    axes = make_axes((1, 1), ax, figsize=(5.0, 3.4))
    axes[0, 0].axhspan(*USUAL_GATES, color="0.9", label="usual range of the mean")
    for head, rows in table.groupby("head"):
        x = rows["layer"] + _offset(head, table["head"].nunique())
        style = {"fmt": "o", "capsize": 2, "label": f"head {head}"}
        axes[0, 0].errorbar(x, rows["mean"], yerr=rows["sd"], **style | kwargs)
    axes[0, 0].set(xlabel="layer", ylabel="gate (mean ± sd)", ylim=(0, 1), xticks=sorted(table["layer"].unique()))
    return _finish_one(axes, ax, show, save)


def attention_sinks(
    adata: AnnData,
    *,
    key: str = _keys.SINKS,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> Axes | None:
    """Plot the largest mean attention that a cell receives, relative to uniform attention 1 / n, by layer and head.

    Parameters
    ----------
    adata
        AnnData after :func:`alphastomics.tl.attention_sinks`.
    key
        ``key_added`` of :func:`alphastomics.tl.attention_sinks`.
    ax
        Axes to plot on.
    show
        Show the figure. By default ``scanpy.settings.autoshow`` if the backend can display figures; never if `ax` is given.
    save
        File to save the figure to.
    **kwargs
        Passed to :meth:`matplotlib.axes.Axes.scatter`.

    Returns
    -------
    The axes; None if the figure was shown.

    Raises
    ------
    KeyError
        If the key is missing.

    Examples
    --------
    >>> asx.tl.attention_sinks(model, query)
    >>> asx.pl.attention_sinks(query)
    """
    table = _summary(adata, key, "attention_sinks")
    axes = make_axes((1, 1), ax, figsize=(5.0, 3.4))
    axes[0, 0].axhline(1, color="0.6", linestyle="--", label="uniform")
    for head, rows in table.groupby("head"):
        x = rows["layer"] + _offset(head, table["head"].nunique())
        axes[0, 0].scatter(x, rows["share"] / rows["uniform"], **{"label": f"head {head}"} | kwargs)
    axes[0, 0].set(xlabel="layer", ylabel="largest attention received × n", yscale="log")
    axes[0, 0].set_xticks(sorted(table["layer"].unique()))
    return _finish_one(axes, ax, show, save)


def expert_usage(
    adata: AnnData,
    *,
    key: str = _keys.EXPERTS,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> Axes | None:
    """Plot the fraction of assignments to each expert by layer; the dashed line is balanced usage, 1 / n_experts.

    Parameters
    ----------
    adata
        AnnData after :func:`alphastomics.tl.expert_usage`.
    key
        ``key_added`` of :func:`alphastomics.tl.expert_usage`.
    ax
        Axes to plot on.
    show
        Show the figure. By default ``scanpy.settings.autoshow`` if the backend can display figures; never if `ax` is given.
    save
        File to save the figure to.
    **kwargs
        Passed to :meth:`matplotlib.axes.Axes.bar`.

    Returns
    -------
    The axes; None if the figure was shown.

    Raises
    ------
    KeyError
        If the key is missing.

    Examples
    --------
    >>> asx.tl.expert_usage(model_with_experts, query)
    >>> asx.pl.expert_usage(query)
    """
    table = _summary(adata, key, "expert_usage")
    axes = make_axes((1, 1), ax, figsize=(5.0, 3.4))
    n_experts = table["expert"].nunique()
    for expert, rows in table.groupby("expert"):
        x = rows["layer"] + _offset(expert, n_experts)
        axes[0, 0].bar(x, rows["usage"], **{"width": 0.8 / n_experts, "label": f"expert {expert}"} | kwargs)
    axes[0, 0].axhline(1 / n_experts, color="0.4", linestyle="--", label="balanced")
    axes[0, 0].set(xlabel="layer", ylabel="fraction of assignments", xticks=sorted(table["layer"].unique()))
    return _finish_one(axes, ax, show, save)


def attention_maps(
    adata: AnnData,
    *,
    key: str = _keys.MAPS,
    position_key: str = _keys.SPATIAL,
    ax: Axes | Sequence[Axes] | None = None,
    show: bool | None = None,
    save: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> np.ndarray[Any, Any] | None:
    """Plot the slice of each selected cell, colored by its attention weights.

    The selected cell is marked by a red cross.

    Parameters
    ----------
    adata
        AnnData after :func:`alphastomics.tl.attention_maps`.
    key
        ``key_added`` of :func:`alphastomics.tl.attention_maps`.
    position_key
        Key of ``obsm`` with the positions, whose first two coordinates are plotted.
    ax
        Axes to plot on, one for each selected cell.
    show
        Show the figure. By default ``scanpy.settings.autoshow`` if the backend can display figures; never if `ax` is given.
    save
        File to save the figure to.
    **kwargs
        Passed to :meth:`matplotlib.axes.Axes.scatter`.

    Returns
    -------
    The axes, (1, n_selected); None if the figure was shown.

    Raises
    ------
    KeyError
        If a key is missing.

    Examples
    --------
    >>> asx.tl.attention_maps(model, query, query.obs_names[:3])
    >>> asx.pl.attention_maps(query, position_key="spatial")
    """
    for name in (key, position_key):
        if name not in adata.obsm:
            remedy = "run alphastomics.tl.attention_maps first" if name == key else "pass position_key=…"
            raise KeyError(f'obsm["{name}"] is missing; {remedy}')
    maps, positions = adata.obsm[key], np.asarray(adata.obsm[position_key], dtype=np.float64)[:, :2]
    axes = make_axes((1, maps.shape[1]), ax)
    for panel, cell in zip(axes[0], maps.columns, strict=True):
        weight = maps[cell].to_numpy()
        drawn = np.flatnonzero(np.isfinite(weight) & np.isfinite(positions).all(axis=1))
        drawn = drawn[np.argsort(weight[drawn])]  # largest weights on top
        style = {"s": 8, "linewidths": 0, "cmap": "viridis", "rasterized": True}
        points = panel.scatter(*positions[drawn].T, c=weight[drawn], **style | kwargs)
        panel.scatter(*positions[adata.obs_names == cell].T, marker="x", color="r")
        panel.set(title=cell, xticks=[], yticks=[])
        panel.set_aspect("equal", adjustable="box")
        panel.figure.colorbar(points, ax=panel, label="attention", shrink=0.8)
    return finish(axes, given=ax is not None, show=show, save=save)


def _summary(adata: AnnData, key: str, tool: str) -> pd.DataFrame:
    """The summary table of a function of ``tl``."""
    if key not in adata.uns:
        raise KeyError(f'uns["{key}"] is missing; run alphastomics.tl.{tool} first, or pass key=…')
    return adata.uns[key]["summary"]


def _offset(part: Any, n_parts: int) -> float:
    """Horizontal offset of a head or expert from its layer."""
    return 0.8 * ((int(part) + 0.5) / n_parts - 0.5)


def _finish_one(
    axes: np.ndarray[Any, Any], ax: Axes | None, show: bool | None, save: str | PathLike[str] | None
) -> Axes | None:
    axes[0, 0].legend(frameon=False, fontsize="small")
    done = finish(axes, given=ax is not None, show=show, save=save)
    return None if done is None else done[0, 0]
