"""How a compared model is scored: where it places held-out cells, what it writes into their places, how it embeds and draws.

The runs of a comparison: what is to be trained, and what each training left.

Finished runs of a comparison: the file that keeps them, and the tables that are made of them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.cluster import KMeans

from alphastomics import _keys
from alphastomics._io._atomic import write_json
from alphastomics._provenance import versions
from alphastomics.data._checks import expression_matrix
from alphastomics.data._slices import slice_rows
from alphastomics.metrics import judge_cells, rigid_align
from alphastomics.tl._agreement import modality_agreement
from alphastomics.tl._evaluate import evaluate
from alphastomics.tl._reconstruct import reconstruct
from alphastomics.tl._scores import cluster_scores

if TYPE_CHECKING:
    from anndata import AnnData

    from alphastomics.data import TissueSchema
    from alphastomics.model import AlphaSTomics

    Scores = dict[str, dict[str, float]]
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from alphastomics.tl._compare import Configuration, Fold

PREDICTED, CLUSTERS = "_predicted", "_clusters"
KMEANS_STARTS = 10


class Scoring(NamedTuple):
    """How expression is sampled and scored.

    Attributes
    ----------
    expression
        Whether it is.
    n_samples
        Draws whose mean is scored.
    n_steps
        Steps of each draw.
    max_cells
        Cells of a slice.
    cell_type_key
        Column of ``obs`` with labels for the oracle and for clusters of embeddings, or None.
    """

    expression: bool
    n_samples: int
    n_steps: int
    max_cells: int
    cell_type_key: str | None


def score_model(model: AlphaSTomics, query: AnnData, scoring: Scoring, *, seed: int) -> Scores:
    """Scores of a trained model on every held-out slice.

    Of positions; of embeddings where labels are named; of expression, and of drawn tissue, where asked for.
    """
    placed = query.copy()
    reconstruct(placed, model=model, random_state=seed)
    parts = [_rows(evaluate(placed, truth=model.schema.position_key, **_library(model.schema)))]
    if scoring.expression:
        asked = sampled_expression(model, placed, scoring, seed=seed)
        parts.append(_rows(evaluate(asked, prediction=None, **_expression(model.schema))))
        parts.append(drawn_agreement(model, query, scoring, seed=seed))
    if scoring.cell_type_key in query.obs:
        parts.append(embedding_scores(model, query, str(scoring.cell_type_key), seed=seed))
    return _joined(*parts)


def embedding_scores(model: AlphaSTomics, query: AnnData, label_key: str, *, seed: int) -> Scores:
    """Clusters of the embeddings of held-out cells, by k-means with as many clusters as there are labels, against these."""
    labeled = query.copy()
    k = max(1, int(query.obs[label_key].nunique()))
    latent = model.get_latent_representation(query)
    means = KMeans(min(k, len(latent)), n_init=KMEANS_STARTS, random_state=seed)
    labeled.obs[CLUSTERS] = means.fit_predict(latent).astype(str)
    table = cluster_scores(labeled, CLUSTERS, label_key=label_key, copy=True, **_library(model.schema))
    assert table is not None  # copy=True
    return _rows(table.drop(columns=["n_cells", "n_skipped"]))


def drawn_agreement(model: AlphaSTomics, query: AnnData, scoring: Scoring, *, seed: int) -> Scores:
    """Agreement of a drawn slice with every held-out one, which has as many cells, up to ``max_cells``."""
    schema, scores = model.schema, {}
    for name, rows in slice_rows(query, schema.slice_key):
        n_cells = min(len(rows), scoring.max_cells)
        drawn = model.sample(mode="joint", n_cells=n_cells, n_steps=scoring.n_steps, random_state=seed)
        table = modality_agreement(
            drawn, query[rows].copy(), spatial_key=schema.position_key, layer=schema.layer, transform=schema.transform,
            copy=True, random_state=seed, **_library(schema),
        )  # fmt: skip
        assert table is not None  # copy=True
        scores[name] = {_keys.MODALITY_AGREEMENT: float(table[_keys.MODALITY_AGREEMENT].mean())}
    return scores


def sampled_expression(model: AlphaSTomics, placed: AnnData, scoring: Scoring, *, seed: int) -> AnnData:
    """Some cells of every slice with ``layers[PREDICTED]``, the mean of a few draws of their expression.

    A slice is first turned into the frame of the reference by the one rigid map that brings its true positions closest to
    those that the model predicted.
    """
    schema = model.schema
    asked = _some_cells(placed, schema, scoring.max_cells)
    registered = asked.copy()
    true, predicted = (
        np.array(asked.obsm[key], dtype=np.float64) for key in (schema.position_key, _keys.RECONSTRUCTED)
    )
    if schema.frame == "slice":
        for _, rows in slice_rows(asked, schema.slice_key):
            true[rows] = rigid_align(true[rows], predicted[rows])[0]
    registered.obsm[schema.position_key] = true
    drawn = model.sample(
        registered,
        mode="pos_to_expr",
        n_samples=scoring.n_samples,
        n_steps=scoring.n_steps,
        reduce="mean" if scoring.n_samples > 1 else None,
        random_state=seed,
    )
    asked.layers[PREDICTED] = drawn[:, asked.var_names].X
    return asked


def baseline_scores(query: AnnData, schema: TissueSchema, scoring: Scoring, *, seed: int) -> dict[str, Scores]:
    """Scores of ``chance`` and, where labels are named, of ``oracle``: values of other cells, or of the same type."""
    options: dict[str, Any] = {"baselines": True, "random_state": seed}
    key = scoring.cell_type_key if scoring.cell_type_key in query.obs else None
    if key is not None:
        options["cell_type_key"] = key
    own = schema.position_key  # the truth as a prediction: only the rows of the baselines are used
    table = evaluate(query, truth=own, prediction=own, **_library(schema), **options)
    tables = [table]
    if scoring.expression:
        some = _some_cells(query, schema, scoring.max_cells)
        some.layers[PREDICTED] = expression_matrix(some, schema.layer).copy()
        tables.append(evaluate(some, prediction=None, **_expression(schema), **options))
    kinds = ["chance", "oracle"] if key is not None else ["chance"]
    return {kind: _joined(*(_rows(each.xs(kind, level="positions")) for each in tables)) for kind in kinds}


def _some_cells(query: AnnData, schema: TissueSchema, max_cells: int) -> AnnData:
    """At most so many cells of every slice, and the genes that the reference has too."""
    groups = slice_rows(query, schema.slice_key)
    rows = np.sort(np.concatenate([rows[judge_cells(len(rows), max_cells, 0)] for _, rows in groups]))
    genes = query.var_names.intersection(pd.Index(schema.genes), sort=False)
    return query[rows, genes].copy()


def _library(schema: TissueSchema) -> dict[str, Any]:
    return {} if schema.slice_key is None else {"library_key": schema.slice_key}


def _expression(schema: TissueSchema) -> dict[str, Any]:
    return _library(schema) | {
        "truth": schema.position_key,
        "layer": schema.layer,
        "expression_layer": PREDICTED,
        "transform": schema.transform,
    }


def _rows(table: pd.DataFrame) -> Scores:
    return {str(name): {str(k): float(v) for k, v in row.items()} for name, row in table.iterrows()}


def _joined(*parts: Scores) -> Scores:
    return {name: {k: v for part in parts for k, v in part.get(name, {}).items()} for name in parts[0]}


# Arguments that change nothing about a result: a run that differs in them alone is the same run.
INDIFFERENT = {"callbacks", "default_root_dir", "enable_progress_bar", "logger", "num_workers"}


class Trial(NamedTuple):
    """One run that is to be done.

    Attributes
    ----------
    name
        Configuration.
    seed
        Of the first weights, and of every draw.
    fold
        Cells.
    model
        Arguments of the model, its width settled.
    train
        Arguments of its training.
    settings
        Everything that decides the result, as plain values.
    """

    name: str
    seed: int
    fold: Fold
    model: dict[str, Any]
    train: dict[str, Any]
    settings: dict[str, Any]


def make_trials(
    chosen: Mapping[str, Configuration],
    folds: Mapping[int, Fold],
    arguments: Mapping[str, dict[str, Any]],
    scoring: Scoring,
) -> list[Trial]:
    """All runs, seed by seed. Every model is made once, so that an argument it refuses costs no training."""
    from alphastomics.model._trial import device_kind

    common = dict(arguments["train"])
    plan = common.pop("plan_kwargs", None) or {}
    shared = {
        "train": {name: value for name, value in common.items() if name not in INDIFFERENT},
        "setup": arguments["setup"],
        "scoring": scoring._asdict(),
        "device": device_kind(common["accelerator"], common["devices"]),
    }
    made = {
        (name, fold.fingerprint): _init(fold, arguments["init"], each)
        for fold in folds.values()
        for name, each in chosen.items()
    }
    trials = []
    for seed, fold in folds.items():
        for name in chosen:
            init = made[name, fold.fingerprint] | {"random_state": seed}
            data = {"fingerprint": fold.fingerprint, "held_out": fold.held_out}
            whole = _plan(fold, {**plan, **chosen[name].plan})
            settings = shared | {"model": init, "plan": whole, "data": data}
            trials.append(Trial(name, seed, fold, init, common | {"plan_kwargs": whole}, as_json(settings)))
    return trials


def _init(fold: Fold, common: Mapping[str, Any], configuration: Configuration) -> dict[str, Any]:
    """All arguments of a model."""
    from alphastomics.model._trial import make_trial_model

    model = make_trial_model(fold.reference, {**common, **configuration.model}, match=configuration.match)
    return dict(model.init_params_["non_kwargs"])


def _plan(fold: Fold, given: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of the training plan."""
    from alphastomics.train import PlanConfig
    from alphastomics.train.defaults import default_deformation

    return asdict(PlanConfig(**{"deformation": default_deformation(fold.reference.n_obs), **given}))


def run_trial(trial: Trial, scoring: Scoring) -> dict[str, Any]:
    """Train and score."""
    import torch

    from alphastomics.model._trial import make_trial_model, parameters_of, train_trial

    model = make_trial_model(trial.fold.reference, trial.model)
    record = train_trial(model, trial.fold.query, **trial.train)
    recorder, count = record.recorder, parameters_of(model)
    last = recorder.points[-1] if recorder.points else None
    return {
        "configuration": trial.name,
        "seed": trial.seed,
        "held_out": trial.fold.held_out,
        "failure": record.failure,
        "parameters": count.total,
        "active_parameters": count.active,
        "d_model": model.module.config.d_model,
        "n_steps": record.n_steps,
        "train_seconds": last.seconds if last else None,
        "step_seconds": recorder.step_seconds,
        "step_processor_seconds": recorder.step_processor_seconds,
        "train_loss": last.train_loss if last else None,
        "validation_loss": last.validation_loss if last else None,
        "curve": {name: [getattr(point, name) for point in recorder.points] for name in CURVE},
        "scores": {} if record.failure else score_model(model, trial.fold.query, scoring, seed=trial.seed),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "settings": trial.settings,
    }


def baseline_runs(fold: Fold, scoring: Scoring, seed: int) -> list[dict[str, Any]]:
    """What needs no training, in the form of runs."""
    empty: dict[str, Any] = dict.fromkeys((*SIZES, *MEASURES)) | {"failure": "", "curve": {name: [] for name in CURVE}}
    return [
        empty | {"configuration": kind, "seed": seed, "held_out": fold.held_out, "scores": scores}
        for kind, scores in baseline_scores(fold.query, fold.schema, scoring, seed=seed).items()
    ]


FORMAT, FORMAT_VERSION = "alphastomics-comparison", 1
SIZES = ("parameters", "active_parameters", "d_model")
MEASURES = ("n_steps", "train_seconds", "step_seconds", "step_processor_seconds", "train_loss", "validation_loss")
CURVE = ("step", "seconds", "train_loss", "validation_loss")
SPREAD = ("train_loss", "validation_loss")  # measures whose standard deviation is of interest, as that of scores is
NOT_SCORES = ("n_cells", "n_skipped", "n_genes")


class RunFile:
    """Finished runs in a JSON file, which is replaced as a whole after every run.

    Parameters
    ----------
    path
        The file; None keeps runs in memory only.

    Raises
    ------
    ValueError
        If the file is not one of ours, or not whole.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self.runs = _read(path)

    def find(self, name: str, seed: int, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """The finished run of that name and seed, if it had exactly these settings."""
        for run in self.runs:
            if (run["configuration"], run["seed"], run["settings"]) == (name, seed, settings):
                return run
        return None

    def add(self, run: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a finished run, beside those that others have added meanwhile."""
        plain = as_json(run)
        if self.path is not None and self.path.exists():
            self.runs = _read(self.path)
        self.runs.append(plain)
        if self.path is not None:
            write_json(self.path, {"format": FORMAT, "format_version": FORMAT_VERSION, "runs": self.runs})
        return plain


def as_json(values: Any) -> Any:
    """Nested values as they will be read back: numbers that are not finite as None, other objects by their ``repr``."""
    return json.loads(json.dumps(_defined(values), default=repr, allow_nan=False))


def _defined(values: Any) -> Any:
    if isinstance(values, dict):
        return {str(name): _defined(value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [_defined(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is truncated or not JSON ({error}); delete it, or pass another results=…") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} does not hold a comparison; pass another results=…")
    if content.get("format_version") != FORMAT_VERSION:
        version = content.get("format_version")
        raise ValueError(f"{path} has format version {version}; this package reads {FORMAT_VERSION}")
    runs: list[dict[str, Any]] = content["runs"]
    return runs


def tables(runs: Sequence[Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
    """Tables of some runs.

    Parameters
    ----------
    runs
        Runs as :class:`RunFile` keeps them.

    Returns
    -------
    ``runs``: one row per run, the mean of its scores over the held-out slices; ``curves``: one row per point;
    ``summary``: one row per configuration, in the order of its first run, see :func:`alphastomics.tl.compare`.
    """
    flat = pd.DataFrame([_row(run) for run in runs])
    points = [
        pd.DataFrame({"configuration": run["configuration"], "seed": run["seed"]} | run["curve"])
        for run in runs
        if run["curve"]["step"]
    ]
    curves = pd.concat(points, ignore_index=True)
    losses = ["train_loss", "validation_loss"]
    curves[losses] = curves[losses].astype(float)
    for name in SIZES:
        flat[name] = flat[name].astype("Int64")  # baselines have no parameters
    return {"summary": _summary(flat), "runs": flat, "curves": curves}


def _row(run: Mapping[str, Any]) -> dict[str, Any]:
    scores = pd.DataFrame(list(run["scores"].values()), dtype=float).mean()
    row = {name: run[name] for name in ("configuration", "seed")} | {"held_out": ", ".join(run["held_out"])}
    row |= {name: _number(run[name]) for name in (*SIZES, *MEASURES)} | {"failed": bool(run["failure"])}
    return row | {str(name): float(value) for name, value in scores.items() if name not in NOT_SCORES}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _summary(flat: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation over seeds."""
    groups = flat.groupby("configuration", sort=False)
    plain = {"configuration", "seed", "held_out", "failed", *SIZES, *MEASURES}
    scores = [name for name in flat.columns if name not in plain]
    columns: dict[str, pd.Series] = {"n_seeds": groups.size(), "n_failed": groups["failed"].sum()}
    columns |= {name: groups[name].first() for name in SIZES}
    for name in (*MEASURES, *scores):
        columns[name] = groups[name].mean()
        if name in SPREAD or name in scores:
            columns[f"{name}_sd"] = groups[name].std()
    return pd.DataFrame(columns)
