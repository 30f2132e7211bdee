"""Arguments that a tool takes for the model that it trains.

Put cells back into a tissue: training, sampling and bookkeeping in one call.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics import _keys

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics

PARTS = ("setup", "init", "train", "sample")


def sort_arguments(
    kwargs: dict[str, Any], *, caller: str, sample: frozenset[str] = frozenset()
) -> dict[str, dict[str, Any]]:
    """Sort arguments by what takes them.

    Parameters
    ----------
    kwargs
        Arguments of :class:`~alphastomics.model.AlphaSTomics`, of its ``setup_anndata`` and ``train``, of a Lightning
        trainer, and of its ``sample``.
    caller
        Name of the function that was given them, for errors.
    sample
        Those of ``sample`` that the caller takes.

    Returns
    -------
    The arguments of ``setup``, ``init``, ``train`` and ``sample``.

    Raises
    ------
    TypeError
        If an argument is unknown.
    """
    import lightning.pytorch as pl

    from alphastomics.model import AlphaSTomics

    def names(function: Any) -> set[str]:
        return set(inspect.signature(function).parameters) - {"self", "adata", "registry", "kwargs", "trainer_kwargs"}

    known: dict[str, set[str]] = {
        "setup": names(AlphaSTomics.setup_anndata),
        "init": names(AlphaSTomics.__init__),
        "train": names(AlphaSTomics.train) | names(pl.Trainer.__init__),
        "sample": set(sample),
    }
    result: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for key, value in kwargs.items():
        part = next((part for part in PARTS if key in known[part]), None)
        if part is None:
            raise TypeError(f"{caller}() got an unexpected argument {key!r}; no part of the model takes it")
        result[part][key] = value
    return result


logger = logging.getLogger(__name__)

CHAIN_STEPS = 25  # steps of a chain when draws or known cells ask for one
PLACEMENT = frozenset({"sampler", "eta", "n_views", "refine"})


def reconstruct(
    query: AnnData,
    reference: AnnData | None = None,
    *,
    model: AlphaSTomics | None = None,
    position_key: str | None = None,
    slice_key: str | None = None,
    layer: str | None = None,
    key_added: str = _keys.RECONSTRUCTED,
    n_samples: int = 1,
    n_steps: int | None = None,
    copy: bool = False,
    random_state: int = 0,
    **kwargs: Any,
) -> AnnData | None:
    """Place cells in a tissue from their expression.

    Parameters
    ----------
    query
        Cells to place. Without ``reference`` and ``model``, those whose position is NaN are placed and the others are
        the reference; in a slice where some positions are known, these are held.
    reference
        Cells with positions, to train on. Positions of the query are then never read.
    model
        A trained model; positions of the query are then never read.
    position_key
        Where positions are in ``obsm``; ``"spatial"`` when None.
    slice_key
        Where the slice of a cell is in ``obs``; ``"slice_id"`` if it is there when None. A query without it is one set.
    layer
        Where expression is; ``X`` when None.
    key_added
        Where to write.
    n_samples
        Number of draws. 1 takes the refined conditional mean, which scores best; several draws give their medoid, a
        likely tissue with realistic density, and an uncertainty.
    n_steps
        Steps per draw; None takes 1 for a single draw, 25 for several or where positions are known.
    copy
        Whether to return a modified copy instead of writing to ``query``.
    random_state
        Decides training and draws.
    **kwargs
        Arguments of :class:`~alphastomics.model.AlphaSTomics`, of its ``setup_anndata``, ``train`` (``max_time``,
        ``max_epochs``) and ``sample``.

    Returns
    -------
    None, or the copy. Written are ``obsm[key_added]``, shape (n_cells, n_dims) in units of the reference;
    ``obs[key_added + "_uncertainty"]`` (root mean square distance of draws from it, same units; 0 for held cells; only
    with several draws); ``obs[key_added + "_placed"]`` (False for the reference, first form only);
    ``uns[key_added]`` (parameters, seed, model, versions; see :func:`provenance`).

    Raises
    ------
    TypeError
        If an argument is unknown.
    KeyError, ValueError
        If the data cannot be used; the message says why and what to do.

    Examples
    --------
    >>> asx.tl.reconstruct(adata)
    >>> asx.tl.reconstruct(query, reference=reference, max_time=300)
    >>> asx.tl.reconstruct(query, model=model, n_samples=8)
    """
    if reference is not None and model is not None:
        raise ValueError("Pass reference= (to train a model) or model= (a trained one), not both")
    arguments = sort_arguments(kwargs, caller="reconstruct", sample=PLACEMENT)
    setup = {"position_key": position_key or _keys.SPATIAL, "slice_key": slice_key, "layer": layer} | arguments["setup"]
    placed = None
    if model is not None:
        _check_unused(model, arguments, position_key=position_key, slice_key=slice_key, layer=layer)
    elif reference is None:
        placed = _unknown(query, setup["position_key"])
        reference = query[_reference_rows(query, placed, setup["slice_key"])]
    trained = model if model is not None else _untrained(reference, setup, arguments["init"], random_state)
    cells = _cells_to_sample(query, placed, trained)
    inpaint = placed is not None
    subject = query[cells] if inpaint else query
    if n_steps is None:
        n_steps = 1 if n_samples == 1 and not inpaint else CHAIN_STEPS
    if n_steps == 1:
        arguments["sample"] = trained.default_placement() | arguments["sample"]
    if model is None:
        _check_query(trained, subject, n_samples=n_samples, n_steps=n_steps, inpaint=inpaint, **arguments["sample"])
        trained.train(**arguments["train"])
    sampled = trained.sample(
        subject,
        mode="expr_to_pos",
        n_steps=n_steps,
        n_samples=n_samples,
        reduce="medoid" if n_samples > 1 else None,
        inpaint=inpaint,
        random_state=random_state,
        **arguments["sample"],
    )
    result = query.copy() if copy else query
    _write(result, sampled, trained, key_added, cells, placed)
    used = {"n_samples": n_samples, "n_steps": n_steps, "random_state": random_state} | kwargs | arguments["sample"]
    result.uns[key_added] = _record(trained, used)
    return result if copy else None


def _unknown(adata: AnnData, position_key: str) -> NDArray[np.bool_]:
    """Cells whose position is NaN."""
    if position_key not in adata.obsm:
        raise KeyError(
            f'obsm["{position_key}"] is missing; pass position_key=…, or reference= or model= to place all cells'
        )
    placed = np.isnan(np.asarray(adata.obsm[position_key], dtype=float)).any(1)
    if not placed.any() or placed.all():
        what = "No cell" if not placed.any() else "Every cell"
        raise ValueError(
            f'{what} has NaN in obsm["{position_key}"]: NaN marks the cells to place and the others are the '
            "reference. Pass reference= or model= to place all cells of an object"
        )
    return placed


def _reference_rows(adata: AnnData, placed: NDArray[np.bool_], slice_key: str | None) -> NDArray[np.bool_]:
    """Known cells to train on: not those of a slice that has too few of them, which are only held."""
    from alphastomics.data._checks import MIN_CELLS

    key = slice_key or _keys.SLICE
    if key not in adata.obs:
        return ~placed
    names, slices = np.unique(adata.obs[key].astype(str).to_numpy(), return_inverse=True)
    n_known = np.bincount(slices[~placed], minlength=len(names))
    few = (n_known > 0) & (n_known < MIN_CELLS)
    if not few.any() or n_known.max() < MIN_CELLS:
        return ~placed
    logger.info("Slices with fewer than %d known cells are not trained on: %s.", MIN_CELLS, ", ".join(names[few]))
    return ~placed & ~few[slices]


def _check_unused(model: AlphaSTomics, arguments: dict[str, dict[str, Any]], **keys: str | None) -> None:
    """Refuse what a trained model cannot follow any more."""
    unused = [name for part in ("setup", "init", "train") for name in arguments[part]]
    unused += [name for name, key in keys.items() if key not in (None, getattr(model.schema, name))]
    if unused:
        raise TypeError(
            f"{', '.join(unused)} cannot change what model= has learned; leave it out, or pass reference= to train "
            "another model"
        )


def _check_query(model: AlphaSTomics, query: AnnData, **arguments: Any) -> None:
    from alphastomics.sampling._place import check_query

    check_query(model, query, **arguments)


def _untrained(reference: AnnData, setup: dict[str, Any], arguments: dict[str, Any], random_state: int) -> AlphaSTomics:
    from alphastomics.model import AlphaSTomics

    # Registering marks an object; the caller's stays as it was.
    reference = reference.copy() if reference.is_view else _shallow(reference)
    AlphaSTomics.setup_anndata(reference, **setup)
    init: dict[str, Any] = {"mode": "expr_to_pos", "random_state": random_state, **arguments}
    return AlphaSTomics(reference, **init)


def _shallow(adata: AnnData) -> AnnData:
    """The same arrays in an object of its own."""
    import anndata as ad

    return ad.AnnData(X=adata.X, obs=adata.obs, var=adata.var, obsm=dict(adata.obsm), layers=dict(adata.layers))


def _cells_to_sample(query: AnnData, placed: NDArray[np.bool_] | None, model: AlphaSTomics) -> NDArray[np.int64]:
    """Rows to sample: all, or those in slices that have a cell to place."""
    if placed is None:
        return np.arange(query.n_obs)
    key = model.schema.slice_key
    if key is None:
        return np.arange(query.n_obs)
    names = query.obs[key].astype(str)
    return np.flatnonzero(names.isin(names[placed].unique()).to_numpy())


def _write(
    result: AnnData,
    sampled: AnnData,
    model: AlphaSTomics,
    key: str,
    cells: NDArray[np.int64],
    placed: NDArray[np.bool_] | None,
) -> None:
    source = model.schema.position_key
    for column in (key + _keys.PLACED_SUFFIX, key + _keys.UNCERTAINTY_SUFFIX):
        if column in result.obs:  # of an earlier call
            del result.obs[column]
    if placed is None:
        result.obsm[key] = sampled.obsm[source]
    else:
        position = np.array(result.obsm[source], dtype=float)
        position[cells] = np.where(placed[cells, None], sampled.obsm[source], position[cells])
        result.obsm[key] = position
        result.obs[key + _keys.PLACED_SUFFIX] = placed
    if _keys.POSITION_UNCERTAINTY in sampled.obs:
        uncertainty = np.zeros(result.n_obs)
        uncertainty[cells] = sampled.obs[_keys.POSITION_UNCERTAINTY].to_numpy()
        result.obs[key + _keys.UNCERTAINTY_SUFFIX] = uncertainty


def _record(model: AlphaSTomics, parameters: dict[str, Any]) -> dict[str, Any]:
    """How the result was made; its ``params`` repeat the call."""
    from alphastomics._provenance import result_record

    keys = {name: getattr(model.schema, name) for name in ("position_key", "slice_key", "cell_type_key", "layer")}
    return result_record(model, "reconstruct", keys | parameters)
