"""Train configurations of a model on the same cells and score them on the same held-out cells."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics import _keys
from alphastomics._checks import check_seed
from alphastomics._labels import label_name
from alphastomics.config import PlanConfig, SetupConfig
from alphastomics.config._comparison import ComparisonConfig, ComparisonMode
from alphastomics.config._setting import check_names, documented
from alphastomics.data._checks import check_in_memory, check_key, check_text
from alphastomics.data._slices import resolve_slice_key, slice_rows
from alphastomics.data._views import shallow_copy
from alphastomics.tl._compare_results import RunFile, as_json, make_tables
from alphastomics.tl._compare_runs import Run, Scoring, Split, baseline_runs
from alphastomics.tl._reconstruct import Arguments, sort_arguments

if TYPE_CHECKING:
    from datetime import timedelta
    from os import PathLike

    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

DEFAULT_SECONDS = 180.0
HELD_OUT_SHARE = 0.2  # of the cells of a single slice
# Arguments of training that do not change its result.
IGNORED = {"callbacks", "default_root_dir", "enable_progress_bar", "logger", "num_workers"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """One row of a comparison: settings that differ from those that all rows share.

    Parameters
    ----------
    model
        Arguments of :class:`~alphastomics.model.AlphaSTomics`.
    plan
        Fields of :class:`~alphastomics.train.PlanConfig`.
    match
        Arguments of another model, in addition to those of `model`. The width of this model is then chosen so that its
        number of parameters is as close to that of the other as the number of heads allows. None keeps the width.

    Examples
    --------
    >>> wide = asx.tl.Configuration(model={"d_model": 256})
    >>> asx.tl.compare(adata, configurations={"default": asx.tl.Configuration(), "wide": wide})
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    match: Mapping[str, Any] | None = None


LINEAR = {"attention": "linear"}


def _experts(**changed: Any) -> dict[str, Any]:
    return {"use_moe": True, **changed}


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
    "linear_high_lr": Configuration(model=LINEAR, plan={"lr": 3 * PlanConfig.lr}),
}
"""The default configurations of :func:`compare`."""


@documented(ComparisonConfig)
def compare(
    adata: AnnData,
    query: AnnData | None = None,
    *,
    configurations: Mapping[str, Configuration] | Sequence[str] | None = None,
    seeds: Sequence[int] = ComparisonConfig.seeds,
    held_out: str | Sequence[str] | Mapping[int, str | Sequence[str]] | None = None,
    max_time: str | timedelta | dict[str, float] | float | None = None,
    max_steps: int | None = None,
    mode: ComparisonMode = ComparisonConfig.mode,
    n_samples: int = ComparisonConfig.n_samples,
    n_steps: int = ComparisonConfig.n_steps,
    max_cells: int = ComparisonConfig.max_cells,
    position_key: str = SetupConfig.position_key,
    slice_key: str | None = None,
    cell_type_key: str | None = None,
    results: str | PathLike[str] | None = None,
    key_added: str = _keys.COMPARISON,
    **kwargs: Any,
) -> pd.DataFrame:
    """Train several configurations with several seeds, and score each on held-out slices.

    Every run trains a model on the other slices and places the held-out cells with the defaults of :func:`reconstruct`. A
    model of mode ``"any"`` also predicts expression at the true positions of the held-out cells (aligned with the predicted
    positions by a rigid map, because each slice has its own frame) and samples a slice. Held-out cells do not influence
    training; their validation loss is only recorded.

    All configurations share width, depth, data, seeds, optimizer, and training time or number of steps. The numbers of
    parameters of the defaults agree within a few percent, because experts split the width of the dense network
    (``expert_width="split"``). The exceptions are ``gated_moe_full``, whose experts have the full width, and
    ``gated_matched``, a dense model with as many parameters as ``gated_moe_full``. To compare other configurations, pass
    `configurations` as a mapping from names to :class:`Configuration`. To hold out other slices for every seed, pass
    `held_out` as a mapping from seeds to slices.

    Parameters
    ----------
    adata
        Cells with expression and positions.
    query
        Held-out cells, if they are a separate object.
    {settings}
    position_key, slice_key, cell_type_key
        As in :meth:`~alphastomics.model.AlphaSTomics.setup_anndata`. Cell types are used only by the oracle and the
        cluster scores.
    results
        JSON file to which every finished run is written. A later call with the same file skips runs with the same
        configuration, seed, data and settings, and keeps the other runs of the file.
    key_added
        Key of ``uns`` for the tables.
    **kwargs
        Further arguments of :class:`~alphastomics.model.AlphaSTomics`, its ``setup_anndata`` and its ``train``, shared by
        all configurations. Those of a configuration take precedence.

    Returns
    -------
    One row per configuration, followed by ``chance`` and, with `cell_type_key`, ``oracle`` (see :func:`evaluate`). The
    columns are means over seeds:

    - ``n_seeds``, and ``n_failed``, the number of runs that ended with a non-finite loss and have no scores;
    - ``parameters``, ``active_parameters`` (used for one cell), ``d_model``;
    - ``n_steps``, ``train_seconds``, ``step_seconds`` (median wall time of a step), ``step_processor_seconds`` (median
      processor time of a step, which does not depend on other programs);
    - ``train_loss`` and ``validation_loss`` at the end of training, without the load-balancing loss of experts;
    - the scores of :func:`evaluate` for positions; in mode ``"any"``, those for expression, and ``modality_agreement`` of
      the sampled slices; with `cell_type_key`, those of :func:`cluster_scores` for k-means clusters of the embeddings.

    For losses and scores, columns ``…_sd`` have the standard deviation over seeds. If seeds hold out different slices, it
    includes the variation between slices; compare configurations seed by seed then.

    ``uns[key_added]`` is set to a dictionary of ``summary`` (this table), ``runs`` (one row per run) and ``curves``
    (``step``, ``seconds``, ``train_loss`` and ``validation_loss`` at several points of each run).

    Raises
    ------
    KeyError, TypeError, ValueError
        If arguments, data or the results file are invalid. These errors are raised before any training.

    See Also
    --------
    alphastomics.pl.comparison : Plot the curves and scores.

    Examples
    --------
    >>> table = asx.tl.compare(adata, configurations=["linear", "gated"], max_time=300, results="comparison.json")
    >>> asx.pl.comparison(adata)
    """
    check_in_memory(adata)
    check_text(key_added, "key_added", "uns")
    if query is not None:
        check_in_memory(query, "query")
    chosen = choose_configurations(configurations)
    ComparisonConfig(
        mode=mode, max_steps=max_steps, n_samples=n_samples, n_steps=n_steps, max_cells=max_cells
    )  # checks
    arguments = _shared_arguments(kwargs, mode, seeds, max_time, max_steps)
    arguments["setup"] |= {"position_key": position_key, "slice_key": slice_key, "cell_type_key": cell_type_key}
    file = RunFile(None if results is None else Path(results))
    scoring = Scoring(
        expression=mode == "any", n_samples=n_samples, n_steps=n_steps, max_cells=max_cells, cell_type_key=cell_type_key
    )
    splits = _splits(adata, query, held_out, seeds, arguments)
    planned = _plan_runs(chosen, splits, arguments, scoring)
    finished = []
    for k, run in enumerate(planned, start=1):
        found = file.find(run.name, run.seed, run.settings)
        skipped = ", already finished" if found else ""
        logger.info("Run %d of %d: %s, seed %d%s.", k, len(planned), run.name, run.seed, skipped)
        found = found or file.add(run.execute(scoring))
        if found["failure"]:
            logger.warning("%s, seed %d, has no scores: %s", run.name, run.seed, found["failure"])
        finished.append(found)
    for seed, split in splits.items():
        finished += baseline_runs(split, scoring, seed)
    tables = make_tables(finished)
    adata.uns[key_added] = tables
    return tables["summary"].copy()


def choose_configurations(chosen: Mapping[str, Configuration] | Sequence[str] | None) -> dict[str, Configuration]:
    """Configurations by name; names are looked up in :data:`CONFIGURATIONS`, all of which are chosen by None."""
    if chosen is None:
        return dict(CONFIGURATIONS)
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    known = chosen if isinstance(chosen, Mapping) else CONFIGURATIONS
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(map(repr, CONFIGURATIONS))
        raise KeyError(f"unknown configuration {', '.join(map(repr, unknown))}; choose configurations=… from {listed}")
    if not names:
        raise ValueError("configurations=… is empty; name at least one, or leave it out for the defaults")
    if reserved := {"chance", "oracle"} & set(names):
        raise ValueError(f"{', '.join(sorted(reserved))} is the name of a baseline; rename it in configurations=…")
    if wrong := [name for name in names if not isinstance(known[name], Configuration)]:
        raise TypeError(f"configurations=… has no Configuration for {wrong[0]!r}; use tl.Configuration(model={{…}})")
    return {name: known[name] for name in names}


def _shared_arguments(
    kwargs: dict[str, Any], mode: str, seeds: Sequence[int], max_time: Any, max_steps: int | None
) -> Arguments:
    """Check the shared arguments and sort them into those of setup, model and training."""
    from alphastomics.train import seconds_of

    if isinstance(seeds, Integral):
        raise TypeError(f"seeds={seeds} is one number; pass seeds=[{seeds}]")
    seeds = [check_seed(seed, "seeds") for seed in seeds]
    if not len(seeds) or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)} must have at least one seed and no duplicates")
    if max_time is not None and max_steps is not None:
        raise ValueError("pass max_time=… or max_steps=…, not both")
    for name, remedy in (("max_epochs", "max_time or max_steps"), ("random_state", "seeds")):
        if name in kwargs:
            raise TypeError(f"compare() has no argument {name!r}; pass {remedy}")
    arguments = sort_arguments(kwargs, caller="compare", named=("seeds",))
    arguments["init"]["mode"] = mode
    if max_steps is not None:
        arguments["train"] |= {"max_epochs": -1, "max_steps": max_steps}
    else:
        arguments["train"]["max_time"] = DEFAULT_SECONDS if max_time is None else seconds_of(max_time)
    arguments["train"] = {"accelerator": "auto", "devices": 1} | arguments["train"]
    return arguments


def _splits(
    adata: AnnData, query: AnnData | None, held_out: Any, seeds: Sequence[int], arguments: Arguments
) -> dict[int, Split]:
    """The split of each seed; seeds that hold out the same slices share one."""
    if isinstance(held_out, Mapping) and (missing := [seed for seed in seeds if seed not in held_out]):
        raise KeyError(f"held_out=… has no slices for seed {missing[0]}; add them")
    made: dict[tuple[str, ...] | None, Split] = {}
    splits = {}
    for seed in seeds:
        names = held_out[seed] if isinstance(held_out, Mapping) else held_out
        if names is not None:
            names = tuple(sorted(map(label_name, [names] if isinstance(names, str | Integral) else names)))
        if names not in made:
            made[names] = _split(adata, query, names, arguments)
        splits[seed] = made[names]
    return splits


def _split(adata: AnnData, query: AnnData | None, chosen: tuple[str, ...] | None, arguments: Arguments) -> Split:
    """The training cells, registered, and the held-out cells; those of `adata` and `query` are not changed."""
    from alphastomics.data import AnnDataSource
    from alphastomics.model import AlphaSTomics

    slice_key = arguments["setup"]["slice_key"]
    if query is not None:
        if chosen is not None:
            raise ValueError("pass query=… or held_out=…, not both")
        label_key = arguments["setup"]["cell_type_key"]
        if label_key is not None:
            check_key("obs", query.obs, label_key, "cell_type_key")
        names = tuple(name for name, _ in slice_rows(query, resolve_slice_key(query, slice_key)))
        reference = adata
    else:
        rows, names = _held_out_rows(adata, chosen, slice_key)
        reference, query = adata[~rows], adata[rows]
    reference, query = shallow_copy(reference), shallow_copy(query)
    AlphaSTomics.setup_anndata(reference, **arguments["setup"])
    schema = AlphaSTomics(reference, **arguments["init"]).schema
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the placement
        AnnDataSource(query, schema, positions=True)
    return Split(reference=reference, query=query, held_out=names, schema=schema)


def _held_out_rows(
    adata: AnnData, chosen: tuple[str, ...] | None, slice_key: str | None
) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """Mask of the held-out cells, (n_cells,), and the names of their slices."""
    groups = dict(slice_rows(adata, resolve_slice_key(adata, slice_key)))
    mask = np.zeros(adata.n_obs, dtype=bool)
    if len(groups) == 1 and chosen is None:
        logger.warning(
            "There is only one slice: a random %.0f %% of its cells is held out. Their neighbors are in the training set, so "
            "scores are optimistic; only compare configurations with each other.", 100 * HELD_OUT_SHARE,
        )  # fmt: skip
        mask[np.random.default_rng(0).permutation(adata.n_obs)[: round(HELD_OUT_SHARE * adata.n_obs)]] = True
        return mask, tuple(groups)
    chosen = (next(reversed(groups)),) if chosen is None else chosen
    if unknown := [name for name in chosen if name not in groups]:
        listed = ", ".join(map(repr, groups))
        raise KeyError(f"unknown slice {', '.join(map(repr, unknown))}; choose held_out=… from {listed}")
    if not chosen or len(chosen) == len(groups):
        raise ValueError("held_out=… must name at least one slice and leave at least one for training")
    mask[np.concatenate([groups[name] for name in chosen])] = True
    return mask, chosen


def _plan_runs(
    chosen: Mapping[str, Configuration],
    splits: Mapping[int, Split],
    arguments: Mapping[str, dict[str, Any]],
    scoring: Scoring,
) -> list[Run]:
    """All runs, seed by seed. Every model is made once here, so that invalid arguments raise before any training."""
    from alphastomics.train.defaults import default_deformation
    from alphastomics.train.distributed.devices import device_of

    common = dict(arguments["train"])
    plan = common.pop("plan_kwargs", None) or {}
    shared = {
        "train": {name: value for name, value in common.items() if name not in IGNORED and value is not None},
        "setup": arguments["setup"],
        "scoring": asdict(scoring),
        "device": str(device_of(common["accelerator"], common["devices"]).type),
    }
    runs, made = [], {}
    for seed, split in splits.items():
        if split.held_out not in made:
            models = {name: model_arguments(split, arguments["init"], each) for name, each in chosen.items()}
            made[split.held_out] = split.hash(), models
        fingerprint, models = made[split.held_out]
        data = {"fingerprint": fingerprint, "held_out": split.held_out}
        deformation = default_deformation(split.reference.n_obs)
        for name, configuration in chosen.items():
            model = models[name] | {"random_state": seed}
            check_names({**plan, **configuration.plan}, PlanConfig)
            full = asdict(PlanConfig(**{"deformation": deformation, **plan, **configuration.plan}))
            settings = as_json(shared | {"model": model, "plan": full, "data": data})
            train = common | {"plan_kwargs": full}
            runs.append(Run(name=name, seed=seed, split=split, model=model, train=train, settings=settings))
    return runs


def model_arguments(split: Split, common: Mapping[str, Any], configuration: Configuration) -> dict[str, Any]:
    """All arguments of the model of a configuration; its width may follow from ``match``."""
    from alphastomics.model import AlphaSTomics
    from alphastomics.nn import count_parameters, matched_width

    arguments = {**common, **configuration.model}
    model = AlphaSTomics(split.reference, **arguments)
    if configuration.match is not None:
        other = AlphaSTomics(split.reference, **{**arguments, **configuration.match})
        width = matched_width(model.module.config, count_parameters(other.module).total)
        model = AlphaSTomics(split.reference, **{**arguments, "d_model": width})
    return dict(model.init_params_["non_kwargs"])
