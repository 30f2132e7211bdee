"""Training and validation curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alphastomics.pl._figure import finish, held_out_title, make_axes

if TYPE_CHECKING:
    from os import PathLike

    import pandas as pd
    from matplotlib.axes import Axes

SIZE = (5.0, 3.4)  # inches
FAINT = 0.25  # opacity of the values behind their moving average
TOTAL_LOSSES = ("train_loss", "train_loss_epoch", "validation_loss")


def history(
    model_or_history: Any,
    *,
    keys: str | Sequence[str] | None = None,
    smooth: int | None = None,
    ax: Axes | None = None,
    show: bool | None = None,
    save: str | PathLike[str] | None = None,
    **kwargs: Any,
) -> Axes | None:
    """Plot the metrics that were logged in training.

    Each curve is a moving average, with the values behind it as a faint line. The title has the scores of held-out cells of the
    reference, if the last training of the model recorded them.

    Parameters
    ----------
    model_or_history
        A trained model, or its ``history``: a dict of one-column tables, indexed by epoch or step.
    keys
        Metrics to plot, all logged by epoch or all by step, such as ``["train_layout", "train_expression"]``, the losses of
        contexts without positions and with noisy expression. By default ``train_loss`` and ``validation_loss``, or all metrics
        logged by epoch if there is no loss.
    smooth
        Number of values in the moving average. By default a twentieth of the values of a curve; 1 plots the values only.
    ax
        Axes to plot on.
    show
        Show the figure. By default ``scanpy.settings.autoshow`` if the backend can display figures; never if `ax` is given.
    save
        File to save the figure to.
    **kwargs
        Passed to :meth:`matplotlib.axes.Axes.plot`.

    Returns
    -------
    The axes; None if the figure was shown.

    Raises
    ------
    KeyError
        If a key was not logged.
    ValueError
        If the history is empty, metrics logged by epoch and by step are mixed, or `smooth` is below 1.

    Examples
    --------
    >>> asx.pl.history(model)
    """
    if not isinstance(model_or_history, Mapping) and not hasattr(model_or_history, "history"):
        raise TypeError(
            f"model_or_history is of the class {type(model_or_history).__name__}; pass a trained model, or its history"
        )
    tables = model_or_history if isinstance(model_or_history, Mapping) else model_or_history.history
    if not tables:
        raise ValueError("the history is empty; call model.train() first")
    if smooth is not None and smooth < 1:
        raise ValueError(f"smooth={smooth} must be at least 1")
    names = _names(tables, keys)
    units = {str(tables[name].index.name or "epoch") for name in names}
    if len(units) > 1:
        raise ValueError(f"keys=… were logged by {' and by '.join(sorted(units))}; plot them separately")
    axes = make_axes((1, 1), ax, figsize=SIZE)
    for name in names:
        _draw(axes[0, 0], tables[name].iloc[:, 0].dropna(), smooth, **{"label": name} | kwargs)
    axes[0, 0].set(xlabel=units.pop(), ylabel=names[0] if len(names) == 1 else "")
    axes[0, 0].legend(frameon=False)
    trainings = getattr(model_or_history, "trainings_", ())
    if trainings and (title := held_out_title(trainings[-1].get("held_out", {}), SIZE[0])):
        axes[0, 0].set_title(title, fontsize="small")
    done = finish(axes, given=ax is not None, show=show, save=save)
    return None if done is None else done[0, 0]


def _draw(ax: Axes, curve: pd.Series[float], smooth: int | None, **kwargs: Any) -> None:
    """Draw the moving average of a curve, and its values behind it."""
    window = max(1, len(curve) // 20) if smooth is None else smooth
    mean = curve
    if window > 1:
        (values,) = ax.plot(curve.index, curve, **kwargs | {"label": "_values", "alpha": FAINT})
        mean = curve.rolling(window, center=True, min_periods=1).mean()
        kwargs = {"color": values.get_color()} | kwargs
    # A line needs two points; a single value is drawn as a dot.
    marker = {"marker": "o"} if len(curve) < 2 else {}
    ax.plot(mean.index, mean, **marker | kwargs)


def _names(tables: Mapping[str, pd.DataFrame], keys: str | Sequence[str] | None) -> list[str]:
    if keys is None:
        by_epoch = [name for name in tables if not name.endswith("_step")]
        return [name for name in TOTAL_LOSSES if name in tables] or by_epoch or list(tables)
    names = [keys] if isinstance(keys, str) else list(keys)
    for name in names:
        if name not in tables:
            raise KeyError(f"{name!r} was not logged (found: {', '.join(map(repr, tables))}); pass keys=…")
    if not names:
        raise ValueError("keys=… is empty; pass at least one, or leave it out")
    return names
