"""Predict the positions of cells from their expression: training, sampling and writing in one call."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from alphastomics import _keys
from alphastomics._labels import label_name, label_names
from alphastomics.config import (
    DiffusionSettings,
    ModelConfig,
    NetworkConfig,
    PlacementConfig,
    SamplingConfig,
    SetupConfig,
)
from alphastomics.config._setting import settings_of, unexpected_argument
from alphastomics.data._checks import check_in_memory, check_key, read_position
from alphastomics.data._views import shallow_copy
from alphastomics.tl._checks import check_model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics
    from alphastomics.sampling._placed import Placed

Arguments = dict[str, dict[str, Any]]  # keyword arguments by the function that takes them
SHORT = 900.0  # seconds, within which a model that only places cells is more accurate than one for all modes

logger = logging.getLogger(__name__)


def reconstruct(
    query: AnnData,
    reference: AnnData | None = None,
    *,
    model: AlphaSTomics | None = None,
    position_key: str | None = None,
    slice_key: str | None = None,
    layer: str | None = None,
    key_added: str = _keys.RECONSTRUCTED,
    n_samples: int = SamplingConfig.n_samples,
    adapt: bool | None = None,
    copy: bool = False,
    return_model: bool = False,
    random_state: int = SamplingConfig.random_state,
    **kwargs: Any,
) -> AnnData | AlphaSTomics | tuple[AnnData, AlphaSTomics] | None:
    """Predict the positions of cells from their expression.

    There are three forms, which differ in where the known positions come from:

    - ``reconstruct(adata)``: `adata` has cells with positions, on which a model is trained, and cells whose position is NaN,
      which are placed. In a slice with both, the placement is conditioned on the known positions.
    - ``reconstruct(query, reference)``: a model is trained on `reference`.
    - ``reconstruct(query, model=model)``: the trained `model` is used.

    In the second and third form all cells are placed, and positions of `query` are never read.

    Parameters
    ----------
    query
        Cells to place.
    reference
        Cells with positions to train on.
    model
        A trained model.
    position_key
        Key of ``obsm`` with the positions, (n_cells, 2 or 3). ``"spatial"`` when None.
    slice_key
        Column of ``obs`` with the slice of each cell. ``"slice_id"`` when None, if there is such a column. Cells of a
        `query` without this column form one slice.
    layer
        Layer with the expression; ``X`` when None.
    key_added
        Key of ``obsm`` and ``uns`` for the results, and prefix of the columns of ``obs``.
    n_samples
        Number of samples from which the uncertainty of the placement is estimated; 1 gives no uncertainty.
    adapt
        Adapt the trained network to the query, see :meth:`~alphastomics.model.AlphaSTomics.adapt`. By default,
        networks that are trained in this call are adapted to a query that differs from the reference, for which 30 % of
        ``max_time`` is reserved, unless it is shorter than 3 minutes. The weights of a `model` that is passed change.
    copy
        Return a modified copy instead of writing to `query`.
    return_model
        Return the trained model, which places further queries with ``model=…``.
    random_state
        Seed of training and sampling.
    **kwargs
        Further arguments of :class:`~alphastomics.model.AlphaSTomics` (whose ``mode`` is ``"expr_to_pos"`` by default if
        ``max_time`` is shorter than 15 minutes: a model that only places cells needs half of the steps), its ``setup_anndata``,
        its ``train`` (such as ``max_time`` and ``max_epochs``) and its ``sample`` (``refine``; ``independent``, for dissociated
        cells; and ``min_confidence``, below which the position of a cell is NaN).

    Returns
    -------
    None; the modified copy with ``copy=True``; the model with ``return_model=True``; both with both. The following is written:

    - ``obsm[key_added]``: positions in the units of the reference, (n_cells, n_dims);
    - ``obs[key_added + "_uncertainty"]``: root mean square distance of the true position from the conditional mean, estimated by
      the median distance of the samples; same units, 0 for cells with a known position (only with several samples);
    - ``obs[key_added + "_confidence"]``: between 0 and 1, small for cells that match nothing in the reference, 1 for cells with a
      known position; see :meth:`~alphastomics.model.AlphaSTomics.sample`;
    - ``obs[key_added + "_placed"]``: False for cells with a known position (only in the first form);
    - ``obs[key_added + "_tied"]``: True for cells with the same expression as another cell of their slice. Which of them lies where is
      drawn with `random_state` (only if there are such cells);
    - ``uns[key_added]``: parameters, seed, model and versions; see :func:`provenance`.

    Raises
    ------
    TypeError
        If an argument is unknown, or would change a trained `model`.
    KeyError
        If ``obsm``, ``obs`` or ``layers`` has no such key.
    ValueError
        If data or arguments are invalid. Errors are raised before training.

    See Also
    --------
    evaluate : Score the positions against the truth.
    alphastomics.pl.reconstruction : Plot them.

    Examples
    --------
    >>> asx.tl.reconstruct(adata)  # places the cells whose position is NaN
    >>> asx.tl.reconstruct(query, reference, max_time=300)
    >>> model = asx.tl.reconstruct(query, reference, return_model=True)
    >>> asx.tl.reconstruct(another_query, model=model, n_samples=8)
    """
    from alphastomics.sampling._position_draws import write_positions
    from alphastomics.train.adaptation import LEAST_SECONDS, TIME_SHARE
    from alphastomics.train.runner import seconds_of

    check_in_memory(query, "query")
    if reference is not None:
        check_in_memory(reference, "reference")
    if query.is_view and not copy:
        warnings.warn(
            "query is a view of another AnnData: the result is written to a copy of these cells that only query refers to; pass copy=True "
            "or query.copy()",
            UserWarning,
            stacklevel=2,
        )
    if reference is not None and model is not None:
        raise ValueError("pass reference=… to train a model or model=… to use a trained one, not both")
    if adapt not in (None, True, False):
        raise ValueError(f"adapt={adapt!r} must be True, False or None")
    arguments = sort_arguments(
        kwargs, caller="reconstruct", sample=settings_of(PlacementConfig), named=("random_state",)
    )
    position = position_key or _keys.SPATIAL
    setup = {"position_key": position, "slice_key": slice_key, "layer": layer} | arguments["setup"]
    unknown = None  # in the first form, cells without a position
    seconds = seconds_of(arguments["train"].get("max_time"))
    if model is not None:
        check_model(model)
        _check_unused(model, arguments, position_key=position_key, slice_key=slice_key, layer=layer)
        trained = model
    else:
        if reference is not None:
            remedy = "pass position_key=…, or exchange reference and query"
            check_key("reference.obsm", reference.obsm, position, "position_key", remedy)
        else:
            unknown = _without_position(query, position)
            reference = query[_training_cells(query, unknown, slice_key)]
        mode = "expr_to_pos" if seconds is not None and seconds < SHORT else ModelConfig.mode
        trained = _make_model(reference, setup, {"mode": mode, "random_state": random_state} | arguments["init"])
    rows = _rows_to_sample(query, unknown, trained)
    cells = query if unknown is None else query[rows]
    options: dict[str, Any] = {"mode": "expr_to_pos", "inpaint": unknown is not None, "random_state": random_state}
    options |= {"n_samples": n_samples, "reduce": None if n_samples == 1 else "mean", "key_added": key_added}
    config = SamplingConfig(**(options | arguments["sample"]))
    if model is None:
        trained._check_query(cells, config)  # an invalid query must not cost a training
        if adapt is None:
            adapt = (seconds is None or seconds >= LEAST_SECONDS) and trained._differs(cells)
        if adapt and seconds is not None:
            arguments["train"]["max_time"] = (1 - TIME_SHARE) * seconds
        trained.train(**arguments["train"])
    if adapt:
        trained.adapt(cells, inpaint=config.inpaint, max_time=None if seconds is None else TIME_SHARE * seconds)
    placed = trained._place(cells, config)
    if unknown is not None:
        placed = _of_all_cells(placed, rows, unknown, np.asarray(query.obsm[position], dtype=float))
    result = query.copy() if copy else query
    write_positions(result, placed, key_added, reduced=n_samples > 1)
    used = {"n_samples": n_samples, "adapt": adapt, "random_state": random_state} | kwargs
    result.uns[key_added] = _record(trained, used)
    if copy and return_model:
        return result, trained
    return result if copy else trained if return_model else None


def sort_arguments(
    kwargs: dict[str, Any], *, caller: str, sample: Iterable[str] = (), named: Iterable[str] = ()
) -> Arguments:
    """Sort keyword arguments of ``caller`` into ``setup``, ``init``, ``train`` and ``sample``.

    The names are those of the declared settings and of the trainer. ``named`` are further arguments of ``caller``, which may have been
    meant by an unknown one.

    Raises
    ------
    TypeError
        If an argument is unknown.
    """
    from alphastomics.train.arguments import training_argument_names

    names = {
        "setup": set(settings_of(SetupConfig)),
        "init": {name for config in (ModelConfig, NetworkConfig, DiffusionSettings) for name in settings_of(config)},
        "train": set.union(*training_argument_names()),
        "sample": set(sample),
    }
    result: Arguments = {part: {} for part in names}
    for key, value in kwargs.items():
        part = next((part for part, accepted in names.items() if key in accepted), None)
        if part is None:
            raise unexpected_argument(key, sorted(set(named).union(*names.values())), caller)
        result[part][key] = value
    return result


def _without_position(adata: AnnData, position_key: str) -> NDArray[np.bool_]:
    """Cells whose position is NaN, (n_cells,)."""
    if position_key not in adata.obsm:
        raise KeyError(
            f'obsm["{position_key}"] is missing; pass position_key=…, or reference=… or model=… to place all cells'
        )
    unknown: NDArray[np.bool_] = np.any(np.isnan(read_position(adata, position_key, missing=True)), axis=1)
    if not unknown.any() or unknown.all():
        raise ValueError(
            f'{"every" if unknown.any() else "no"} cell has NaN in obsm["{position_key}"], which marks the cells to place; '
            "pass reference=… or model=… to place all cells"
        )
    return unknown


def _training_cells(adata: AnnData, unknown: NDArray[np.bool_], slice_key: str | None) -> NDArray[np.bool_]:
    """Cells with a position, (n_cells,), except those of slices that have too few of them."""
    from alphastomics.data._checks import MIN_CELLS

    key = slice_key or _keys.SLICE
    if key not in adata.obs:
        return ~unknown
    slices, names = pd.factorize(adata.obs[key])  # -1 without a slice, which is reported later
    n_known = np.bincount(slices[~unknown & (slices >= 0)], minlength=len(names))
    too_few = (n_known > 0) & (n_known < MIN_CELLS)
    if not too_few.any() or n_known.max() < MIN_CELLS:
        return ~unknown
    logger.info(
        "Slices with fewer than %d known positions are left out: %s.",
        MIN_CELLS,
        ", ".join(sorted(map(label_name, names[too_few]))),
    )
    return ~unknown & ~np.isin(slices, np.flatnonzero(too_few))


def _check_unused(model: AlphaSTomics, arguments: Arguments, **keys: str | None) -> None:
    """Raise if an argument would change a trained model."""
    unused = [name for part in ("setup", "init", "train") for name in arguments[part]]
    unused += [name for name, key in keys.items() if key not in (None, getattr(model.schema, name))]
    if unused:
        raise TypeError(
            f"{', '.join(unused)} cannot change a trained model; leave it out, or pass reference=… instead of model=…"
        )


def _make_model(reference: AnnData, setup: dict[str, Any], arguments: dict[str, Any]) -> AlphaSTomics:
    """An untrained model of the reference, which is left unregistered."""
    from alphastomics.model import AlphaSTomics

    cells = shallow_copy(reference)
    AlphaSTomics.setup_anndata(cells, **setup)
    return AlphaSTomics(cells, **arguments)


def _rows_to_sample(query: AnnData, unknown: NDArray[np.bool_] | None, model: AlphaSTomics) -> NDArray[np.int64]:
    """Rows of all cells, or of those in slices with an unknown position."""
    key = model.schema.slice_key
    if unknown is None or key is None:
        return np.arange(query.n_obs)
    names = pd.Series(label_names(query.obs[key]))
    return np.flatnonzero(names.isin(names[unknown].unique()).to_numpy())


def _of_all_cells(
    placed: Placed, rows: NDArray[np.int64], unknown: NDArray[np.bool_], position: NDArray[np.float64]
) -> Placed:
    """Results of all cells from those of ``rows``; the other cells have a known position (n_cells, n_dims)."""
    positions, uncertainty, confidence = position.copy(), np.zeros(len(position)), np.ones(len(position))
    positions[rows] = np.where(unknown[rows, None], placed.positions[0], position[rows])
    uncertainty[rows], confidence[rows] = placed.uncertainty, placed.confidence
    tied = np.zeros_like(unknown)
    tied[rows] = placed.tied
    return placed._replace(
        positions=positions[None], uncertainty=uncertainty, confidence=confidence, tied=tied, known=~unknown
    )


def _record(model: AlphaSTomics, parameters: dict[str, Any]) -> dict[str, Any]:
    """Provenance of the result; ``params`` are arguments that repeat the call."""
    from alphastomics._provenance import result_record

    keys = {name: getattr(model.schema, name) for name in ("position_key", "slice_key", "cell_type_key", "layer")}
    return result_record(model, "reconstruct", keys | parameters)
