"""Training curves and scores of compared configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from alphastomics import _keys
from alphastomics.pl._figure import finish, make_axes

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd
    from anndata import AnnData
    from matplotlib.axes import Axes

LOSSES = {"train_loss": "training loss", "validation_loss": "validation loss"}
SCORES = (
    "distance_spearman",
    "knn_preservation",
    "contact_precision",
    "aligned_rmsd",
    "pearson_gene",
    "expression_mse",
    "moran_correlation",
    "step_processor_seconds",
    "parameters",
)
N_COLUMNS = 3
N_GRID = 50  # points of a mean curve


def comparison(
    adata: AnnData | Mapping[str, pd.DataFrame],
    *,
    scores: str | Sequence[str] | None = None,
    by: Literal["seconds", "step"] = "seconds",
    key: str = _keys.COMPARISON,
    ax: Axes | Sequence[Axes] | None = None,
    figsize: tuple[float, float] | None = None,
    show: bool | None = None,
    save: str | PathLike[str] | None = None,
) -> np.ndarray[Any, Any] | None:
    """Plot the losses and scores of compared configurations.

    Loss curves are means over seeds with bands of one standard deviation, over the range that all seeds of a configuration
    cover. Scores are shown for every run, with mean and standard deviation over seeds.

    Parameters
    ----------
    adata
        AnnData after :func:`alphastomics.tl.compare`, or the tables that it wrote to ``uns[key]``.
    scores
        Columns of the table ``runs`` to plot. By default a selection of scores, the time per step and the number of parameters.
    by
        x-axis of the curves: time in ``"seconds"``, or optimizer ``"step"``.
    key
        ``key_added`` of :func:`alphastomics.tl.compare`.
    ax
        Axes to plot on: two for the losses, then one for each score.
    figsize
        Width and height of a new figure in inches.
    show
        Show the figure. By default ``scanpy.settings.autoshow`` if the backend can display figures; never if `ax` is given.
    save
        File to save the figure to.

    Returns
    -------
    The axes, (n_rows, 3); unused axes are switched off. None if the figure was shown.

    Raises
    ------
    KeyError
        If `key` or a score is missing.
    ValueError
        If the number of axes is wrong, or `by` is unknown.

    Examples
    --------
    >>> asx.tl.compare(adata, configurations=["linear", "gated"], max_time=300)
    >>> asx.pl.comparison(adata, scores=["distance_spearman", "knn_preservation"])
    """
    if by not in ("seconds", "step"):
        raise ValueError(f"by={by!r} is unknown; pass 'seconds' or 'step'")
    tables = _tables(adata, key)
    names = _scores(tables["runs"], scores)
    colors = _colors(tables["curves"])
    n_panels = len(LOSSES) + len(names)
    n_rows = -(-n_panels // N_COLUMNS)
    n_labels = tables["runs"]["configuration"].nunique()
    if figsize is None:
        figsize = (5.0 * N_COLUMNS, max(3.2, 0.8 + 0.24 * n_labels) * n_rows)
    axes = make_axes((n_rows, N_COLUMNS) if ax is None else (1, n_panels), ax, figsize=figsize)
    panels = list(axes.flat)
    for panel, (loss, label) in zip(panels, LOSSES.items(), strict=False):
        _draw_curves(panel, tables["curves"], loss, by, colors)
        panel.set(xlabel="seconds" if by == "seconds" else "step", ylabel=label)
    panels[0].legend(frameon=False, fontsize="x-small")
    for panel, name in zip(panels[len(LOSSES) :], names, strict=False):
        _draw_score(panel, tables["runs"], name, colors)
    for panel in panels[n_panels:]:
        panel.set_axis_off()
    return finish(axes, given=ax is not None, show=show, save=save)


def _tables(adata: Any, key: str) -> Mapping[str, pd.DataFrame]:
    from alphastomics.data._checks import check_type

    if isinstance(adata, Mapping):
        return adata
    check_type(adata)
    if key not in adata.uns:
        raise KeyError(f'uns["{key}"] is missing; run alphastomics.tl.compare first, or pass key=…')
    found: Mapping[str, pd.DataFrame] = adata.uns[key]
    return found


def _scores(runs: pd.DataFrame, scores: str | Sequence[str] | None) -> list[str]:
    if scores is None:
        return [name for name in SCORES if name in runs]
    names = [scores] if isinstance(scores, str) else list(scores)
    known = [name for name in runs.columns if name not in ("configuration", "seed", "held_out", "failed")]
    if missing := [name for name in names if name not in known]:
        raise KeyError(
            f"unknown score {', '.join(map(repr, missing))}; choose scores=… from {', '.join(map(repr, known))}"
        )
    return names


def _colors(curves: pd.DataFrame) -> dict[str, Any]:
    import matplotlib as mpl

    names = list(dict.fromkeys(curves["configuration"]))
    palette = mpl.colormaps["tab10" if len(names) <= 10 else "tab20"]
    return {name: palette(i % palette.N) for i, name in enumerate(names)}


def _draw_curves(panel: Axes, curves: pd.DataFrame, loss: str, by: str, colors: Mapping[str, Any]) -> None:
    for name, color in colors.items():
        runs = [
            run.dropna(subset=[loss]) for _, run in curves[curves["configuration"] == name].groupby("seed", sort=False)
        ]
        runs = [run for run in runs if len(run)]
        if not runs:
            continue
        # Seeds stop at different steps and times: the mean covers the range that all of them have. Without one, each is drawn.
        low, high = max(run[by].iloc[0] for run in runs), min(run[by].iloc[-1] for run in runs)
        if low > high:
            for k, run in enumerate(runs):
                style: dict[str, Any] = {"label": name if k == 0 else None, "marker": "o" if len(run) < 2 else None}
                panel.plot(run[by], run[loss], color=color, linewidth=1.2, **style)
            continue
        shared = np.linspace(low, high, N_GRID if low < high else 1)
        grid = runs[0][by].to_numpy(dtype=float) if len(runs) == 1 else shared
        values = np.stack([np.interp(grid, run[by], run[loss]) for run in runs])
        mean = values.mean(axis=0)
        panel.plot(grid, mean, color=color, label=name, marker="o" if len(grid) < 2 else None, linewidth=1.2)
        if len(runs) > 1:
            spread = values.std(axis=0, ddof=1)
            panel.fill_between(grid, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0)


def _draw_score(panel: Axes, runs: pd.DataFrame, score: str, colors: Mapping[str, Any]) -> None:
    names = list(dict.fromkeys(runs["configuration"]))
    values = runs[score].astype("Float64").to_numpy(dtype=float, na_value=np.nan)
    for row, name in enumerate(names):
        chosen = values[(runs["configuration"] == name).to_numpy()]
        chosen = chosen[np.isfinite(chosen)]
        if not len(chosen):
            continue
        color = colors.get(name, "0.5")
        panel.scatter(chosen, np.full(len(chosen), row), color=color, s=12, alpha=0.5, linewidths=0)
        spread = chosen.std(ddof=1) if len(chosen) > 1 else 0.0
        panel.errorbar(chosen.mean(), row, xerr=spread, color=color, fmt="|", markersize=10, capsize=2)
    panel.set(xlabel=score.replace("_", " "), yticks=range(len(names)), ylim=(len(names) - 0.5, -0.5))
    panel.set_yticklabels(names, fontsize="x-small")
