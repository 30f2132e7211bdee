"""Train configurations of a model on the same cells and score them on the same held-out cells."""

from __future__ import annotations

import logging
from dataclasses import asdict
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphastomics import _keys
from alphastomics._checks import check_seed
from alphastomics.config import PlanConfig, SetupConfig
from alphastomics.config._comparison import ComparisonConfig, ComparisonMode
from alphastomics.config._setting import check_names, documented
from alphastomics.data._checks import check_in_memory, check_text
from alphastomics.tl._compare_configurations import Configuration, choose_configurations, model_arguments
from alphastomics.tl._compare_results import RunFile, as_json, make_tables
from alphastomics.tl._compare_runs import Run, Scoring, baseline_runs
from alphastomics.tl._compare_splits import Split, make_splits
from alphastomics.tl._reconstruct import Arguments, sort_arguments

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta
    from os import PathLike

    import pandas as pd
    from anndata import AnnData

logger = logging.getLogger(__name__)

DEFAULT_SECONDS = 180.0
# Arguments of training that do not change its result.
IGNORED = {"callbacks", "default_root_dir", "enable_progress_bar", "logger", "num_workers"}


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
    splits = make_splits(adata, query, held_out, seeds, arguments)
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
