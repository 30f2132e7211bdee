"""What is compared: named changes to a model and to its training.

What a compared model is trained on, and what it is asked about.

Train configurations of a model on the same cells, and score them on the same held-out cells.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import scipy.sparse as sp

from alphastomics import _keys
from alphastomics.data._checks import check_choice, expression_matrix
from alphastomics.data._slices import resolve_slice_key, slice_rows
from alphastomics.tl._compare_runs import RunFile, Scoring, baseline_runs, make_trials, run_trial, tables
from alphastomics.tl._reconstruct import sort_arguments

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta
    from os import PathLike

    import pandas as pd
    from anndata import AnnData

    from alphastomics.data import TissueSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One row of a comparison: what differs from the model and the training that all rows share.

    Parameters
    ----------
    model
        Arguments of :class:`~alphastomics.model.AlphaSTomics`.
    plan
        Fields of :class:`~alphastomics.train.PlanConfig`.
    match
        Arguments, on top of those of `model`, of another model: the width of this one is chosen so that both have the
        same total number of parameters, as nearly as the heads allow. None leaves the width as it is.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    match: Mapping[str, Any] | None = None


LINEAR = {"attention": "linear"}
HIGH_LR = 3e-3  # three times the default


def _experts(num_experts: int = 4, moe_top_k: int = 2, expert_width: str = "split") -> dict[str, Any]:
    return {"use_moe": True, "num_experts": num_experts, "moe_top_k": moe_top_k, "expert_width": expert_width}


CONFIGURATIONS: dict[str, Configuration] = {
    "linear": Configuration(model=LINEAR),
    "gated": Configuration(),
    "linear_moe": Configuration(model=LINEAR | _experts()),
    "gated_moe": Configuration(model=_experts()),
    "gated_elementwise": Configuration(model={"gate_type": "elementwise"}),
    "gated_no_qk_norm": Configuration(model={"use_qk_norm": False}),
    "gated_moe_4_top_1": Configuration(model=_experts(moe_top_k=1)),
    "gated_moe_8_top_2": Configuration(model=_experts(num_experts=8)),
    "gated_moe_full": Configuration(model=_experts(expert_width="full")),
    "gated_matched": Configuration(match=_experts(expert_width="full")),
    "linear_high_lr": Configuration(model=LINEAR, plan={"lr": HIGH_LR}),
}
"""The configurations that :func:`alphastomics.tl.compare` compares unless told otherwise."""


def choose_configurations(chosen: Mapping[str, Configuration] | Sequence[str] | None) -> dict[str, Configuration]:
    """Settle what is compared: a mapping as it is, names among :data:`CONFIGURATIONS`, or all of these.

    Raises
    ------
    KeyError
        If a name is unknown.
    ValueError
        If there is none, or one has the name of a baseline.
    """
    if isinstance(chosen, str):
        chosen = [chosen]
    if chosen is None:
        return dict(CONFIGURATIONS)
    if isinstance(chosen, Mapping):
        found = dict(chosen)
    else:
        unknown = [name for name in chosen if name not in CONFIGURATIONS]
        if unknown:
            listed = ", ".join(map(repr, CONFIGURATIONS))
            raise KeyError(
                f"{', '.join(map(repr, unknown))} is no configuration; choose configurations=… from {listed}"
            )
        found = {name: CONFIGURATIONS[name] for name in chosen}
    if not found:
        raise ValueError("configurations=… is empty; name at least one, or leave it out")
    if reserved := {"chance", "oracle"} & set(found):
        raise ValueError(f"{', '.join(sorted(reserved))} is the name of a baseline; call the configuration otherwise")
    return found


logger = logging.getLogger(__name__)

SHARE_OF_ONE_SLICE = 0.2


class Fold(NamedTuple):
    """One division of the cells.

    Attributes
    ----------
    reference
        Cells to train on, registered.
    query
        Held-out cells.
    held_out
        Names of their slices.
    schema
        What a model of the reference reads.
    fingerprint
        Hash of all that is read of both.
    """

    reference: AnnData
    query: AnnData
    held_out: tuple[str, ...]
    schema: TissueSchema
    fingerprint: str


def make_fold(
    adata: AnnData, query: AnnData | None, chosen: tuple[str, ...] | None, arguments: Mapping[str, dict[str, Any]]
) -> Fold:
    """Divide the cells, and register those to train on.

    Parameters
    ----------
    adata, query, chosen
        As in :func:`split`.
    arguments
        Arguments of ``setup`` and ``init`` of the model.
    """
    from alphastomics.model import AlphaSTomics

    reference, asked, names = split(adata, query, chosen, arguments["setup"]["slice_key"])
    AlphaSTomics.setup_anndata(reference, **arguments["setup"])
    schema = AlphaSTomics(reference, **arguments["init"]).schema
    return Fold(reference, asked, names, schema, fingerprint([reference, asked], schema))


def choose_slices(held_out: Any, seed: int) -> tuple[str, ...] | None:
    """Slices that a seed holds out, sorted; None where nobody says."""
    chosen = held_out[seed] if isinstance(held_out, Mapping) else held_out
    if chosen is None:
        return None
    return tuple(sorted([chosen] if isinstance(chosen, str) else map(str, chosen)))


def split(
    adata: AnnData, query: AnnData | None, chosen: tuple[str, ...] | None, slice_key: str | None
) -> tuple[AnnData, AnnData, tuple[str, ...]]:
    """Copies of the cells to train on and of those that are held out, and the names of the slices of the latter.

    Raises
    ------
    KeyError
        If a slice is unknown.
    ValueError
        If nothing would be left to train on, or both a query and slices are given.
    """
    if query is not None:
        if chosen is not None:
            raise ValueError("pass query=, cells of their own, or held_out=, slices of adata, not both")
        names = tuple(name for name, _ in slice_rows(query, resolve_slice_key(query, slice_key)))
        return adata.copy(), query.copy(), names
    groups = dict(slice_rows(adata, resolve_slice_key(adata, slice_key)))
    if len(groups) == 1 and chosen is None:
        return _split_slice(adata, next(iter(groups)))
    chosen = (next(reversed(groups)),) if chosen is None else chosen
    if unknown := [name for name in chosen if name not in groups]:
        listed = ", ".join(map(repr, groups))
        raise KeyError(f"there is no slice {', '.join(map(repr, unknown))}; choose held_out=… from {listed}")
    if not chosen or len(chosen) == len(groups):
        raise ValueError("held_out=… must name some of the slices, and leave some to train on")
    rows = np.sort(np.concatenate([groups[name] for name in chosen]))
    return adata[np.setdiff1d(np.arange(adata.n_obs), rows)].copy(), adata[rows].copy(), chosen


def _split_slice(adata: AnnData, name: str) -> tuple[AnnData, AnnData, tuple[str, ...]]:
    logger.warning(
        "There is one slice: a random %.0f %% of its cells is held out. Their neighbors are among those that are "
        "trained on, and scores are too good; compare configurations with each other only.", 100 * SHARE_OF_ONE_SLICE,
    )  # fmt: skip
    order = np.random.default_rng(0).permutation(adata.n_obs)
    n_held_out = round(SHARE_OF_ONE_SLICE * adata.n_obs)
    held_out, rest = np.sort(order[:n_held_out]), np.sort(order[n_held_out:])
    return adata[rest].copy(), adata[held_out].copy(), (name,)


def fingerprint(parts: Sequence[AnnData], schema: TissueSchema) -> str:
    """Short hash of expression, genes, positions and slices."""
    digest = hashlib.sha256()
    for adata in parts:
        matrix: Any = expression_matrix(adata, schema.layer)
        if sp.issparse(matrix):
            matrix = sp.csr_matrix(matrix)
        arrays = [matrix.indptr, matrix.indices, matrix.data] if sp.issparse(matrix) else [matrix]
        for array in [*arrays, np.asarray(adata.obsm[schema.position_key])]:
            digest.update(str((array.shape, array.dtype)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        slices = [] if schema.slice_key is None else adata.obs[schema.slice_key].astype(str).tolist()
        digest.update("\n".join([*map(str, adata.var_names), *slices]).encode())
    return digest.hexdigest()[:16]


DEFAULT_SECONDS = 180.0


def compare(
    adata: AnnData,
    query: AnnData | None = None,
    *,
    configurations: Mapping[str, Configuration] | Sequence[str] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    held_out: str | Sequence[str] | Mapping[int, str | Sequence[str]] | None = None,
    max_time: str | timedelta | dict[str, float] | float | None = None,
    max_steps: int | None = None,
    mode: Literal["any", "expr_to_pos"] = "any",
    n_samples: int = 4,
    n_steps: int = 10,
    max_cells: int = 2000,
    position_key: str = _keys.SPATIAL,
    slice_key: str | None = None,
    cell_type_key: str | None = None,
    results: str | PathLike[str] | None = None,
    key_added: str = _keys.COMPARISON,
    **kwargs: Any,
) -> pd.DataFrame:
    """Train several configurations with several seeds, and score each on slices that it never saw.

    Every run trains on the other slices and places the held-out cells as :func:`reconstruct` does by default; a model of
    mode ``"any"`` then also writes expression into their true places, turned into the frame of the reference by the one
    rigid map that brings them closest to where it placed the cells, and draws a slice of its own. What is held out decides
    nothing in training; the validation loss is only watched.

    All rows have the same width, depth, data, seeds and optimizer, and the same time or the same number of steps. With
    experts that share the width of the dense network (``expert_width="split"``), and with a gate for each head, the total
    number of parameters is then the same within a few per cent, so that differences between these rows are not differences
    of size. ``gated_moe_full``, whose experts are each as wide as the dense network, is the one row that is much larger:
    beside it stands ``gated_matched``, a dense model wide enough to have the same total number of parameters.

    Parameters
    ----------
    adata
        Cells with expression and positions.
    query
        Held-out cells, where they are an object of their own.
    configurations
        Names and :class:`Configuration` of what is compared; or some of the names of the defaults: ``linear`` and
        ``gated`` (attention), ``linear_moe`` and ``gated_moe`` (with 4 experts, 2 for each cell), ``gated_elementwise``,
        ``gated_no_qk_norm``, ``gated_moe_4_top_1``, ``gated_moe_8_top_2``, ``gated_moe_full``, ``gated_matched``, and
        ``linear_high_lr`` (three times the learning rate). All of these when None.
    seeds
        Seeds. The runs of one seed come one after another, so that whatever changes on the machine meets all
        configurations alike.
    held_out
        Slices of `adata` to hold out, for all seeds, or for each seed in a mapping. None holds out the last one by name;
        where there is but one slice, a random fifth of its cells, with a warning.
    max_time
        Time of each training, as in :meth:`~alphastomics.model.AlphaSTomics.train`, 180 seconds when neither this nor
        `max_steps` is given. Watching the validation loss takes a few per cent of it.
    max_steps
        Steps of each training instead, so that a slow configuration gets as many as a quick one.
    mode
        ``"any"``, or ``"expr_to_pos"`` for models that only place cells.
    n_samples, n_steps
        Draws of expression whose mean is scored, and steps of each, and of the slices that are drawn.
    max_cells
        Expression is sampled for at most so many cells of each slice, and at most so many are drawn.
    position_key, slice_key, cell_type_key
        As in :meth:`~alphastomics.model.AlphaSTomics.setup_anndata`; labels are for the oracle and for the scores of
        clusters alone.
    results
        JSON file in which every finished run is kept at once. A later call with the same file repeats no run that has the
        same configuration, seed, data and settings; the runs of other calls stay in it.
    key_added
        Where the tables go in ``uns``.
    **kwargs
        Further arguments of :class:`~alphastomics.model.AlphaSTomics`, of its ``setup_anndata`` and ``train``, for all
        configurations, which have the last word.

    Returns
    -------
    One row per configuration, then ``chance`` and, with `cell_type_key`, ``oracle``, as in :func:`evaluate`. Columns, means
    over seeds: ``n_seeds``; ``n_failed``, how many of them ended with a loss that was not finite and are not in the means of
    the scores; ``parameters``, ``active_parameters`` (those that a cell meets) and ``d_model``; ``n_steps`` and
    ``train_seconds``; ``step_seconds`` and ``step_processor_seconds``, the median over steps of the time on the wall, and of
    that for which processors were busy, which other programs do not change; ``train_loss`` and ``validation_loss`` at the end,
    without the balance of experts; the scores of :func:`evaluate`, of positions and, for mode ``"any"``, of expression and,
    as ``modality_agreement``, of the slices that the model draws; with `cell_type_key`, those of :func:`cluster_scores`, of
    embeddings clustered by k-means.
    Losses and scores have their standard deviation over seeds in ``…_sd``. It includes that between slices where seeds hold
    out different ones; since all configurations have the same, compare them seed by seed.

    Written is ``uns[key_added]``: ``summary``, this table; ``runs``, a row for each run; ``curves``, ``step``, ``seconds``,
    ``train_loss`` and ``validation_loss`` at some points of each run.

    Raises
    ------
    KeyError, TypeError, ValueError
        If an argument, the data or the file cannot be used; before anything is trained.

    Examples
    --------
    >>> table = asx.tl.compare(adata, configurations=["linear", "gated"], max_time=300, results="comparison.json")
    >>> asx.pl.comparison(adata)
    >>> wide = asx.tl.Configuration(model={"d_model": 256})
    >>> asx.tl.compare(adata, configurations={"default": asx.tl.Configuration(), "wide": wide}, seeds=[0])
    """
    chosen = choose_configurations(configurations)
    arguments = _arguments(kwargs, mode, seeds, max_time, max_steps)
    arguments["setup"] |= {"position_key": position_key, "slice_key": slice_key, "cell_type_key": cell_type_key}
    store = RunFile(None if results is None else _prepared(Path(results)))
    scoring = Scoring(mode == "any", n_samples, n_steps, max_cells, cell_type_key)
    folds = _folds(adata, query, held_out, seeds, arguments)
    trials = make_trials(chosen, folds, arguments, scoring)
    runs = []
    for k, trial in enumerate(trials, start=1):
        run = store.find(trial.name, trial.seed, trial.settings)
        logger.info(
            "Run %d of %d: %s, seed %d%s.", k, len(trials), trial.name, trial.seed, ", is finished" if run else ""
        )
        run = run or store.add(run_trial(trial, scoring))
        if run["failure"]:
            logger.warning("%s, seed %d, has no scores. %s", trial.name, trial.seed, run["failure"])
        runs.append(run)
    for seed, fold in folds.items():
        runs += baseline_runs(fold, scoring, seed)
    found = tables(runs)
    adata.uns[key_added] = found
    return found["summary"].copy()


def _arguments(
    kwargs: dict[str, Any], mode: str, seeds: Sequence[int], max_time: Any, max_steps: int | None
) -> dict[str, dict[str, Any]]:
    """Arguments of all configurations, by what takes them."""
    from alphastomics.train import seconds_of

    check_choice("mode", mode, ("any", "expr_to_pos"))
    if not len(seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)} must name at least one seed, and none twice")
    if max_time is not None and max_steps is not None:
        raise ValueError("pass max_time=, the same time for all, or max_steps=, the same number of steps, not both")
    for name, remedy in (("max_epochs", "max_time= or max_steps="), ("random_state", "seeds=")):
        if name in kwargs:
            raise TypeError(f"compare() takes no {name!r}; pass {remedy}")
    arguments = sort_arguments(kwargs, caller="compare")
    arguments["init"]["mode"] = mode
    if max_steps is not None:
        arguments["train"] |= {"max_epochs": -1, "max_steps": max_steps}
    else:
        arguments["train"]["max_time"] = DEFAULT_SECONDS if max_time is None else seconds_of(max_time)
    arguments["train"] = {"accelerator": "auto", "devices": 1} | arguments["train"]
    return arguments


def _prepared(path: Path) -> Path:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file with results=…")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _folds(
    adata: AnnData,
    query: AnnData | None,
    held_out: Any,
    seeds: Sequence[int],
    arguments: Mapping[str, dict[str, Any]],
) -> dict[int, Fold]:
    """The cells of each seed; seeds that hold out the same slices share them."""
    if isinstance(held_out, Mapping) and (missing := [seed for seed in seeds if seed not in held_out]):
        raise KeyError(f"held_out=… does not say what seed {missing[0]} holds out")
    chosen = {seed: choose_slices(held_out, seed) for seed in seeds}
    made = {names: make_fold(adata, query, names, arguments) for names in dict.fromkeys(chosen.values())}
    return {seed: made[chosen[seed]] for seed in seeds}
