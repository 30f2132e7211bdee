"""Runs of a comparison: train one configuration with one seed and score it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from sklearn.cluster import KMeans

from alphastomics import _keys
from alphastomics._provenance import versions
from alphastomics.config import DEFAULT_BATCH_SIZE, DEFAULT_CONTEXT_SIZE, TrainingConfig
from alphastomics.data._checks import expression_matrix
from alphastomics.data._slices import slice_rows
from alphastomics.metrics import rigid_align, subsample_cells
from alphastomics.metrics._agreement import N_NEIGHBORS
from alphastomics.tl._agreement import modality_agreement
from alphastomics.tl._compare_results import CURVE, MEASURES, SIZES
from alphastomics.tl._evaluate import evaluate
from alphastomics.tl._neighbors import without_cell_types
from alphastomics.tl._reconstruct import reconstruct
from alphastomics.tl._scores import cluster_scores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anndata import AnnData

    from alphastomics.data import Batch, Context, TissueSchema
    from alphastomics.model import AlphaSTomics
    from alphastomics.tl._compare_splits import Split
    from alphastomics.train import TrainingRecorder

    Scores = dict[str, dict[str, float]]  # scores by slice

PREDICTED, CLUSTERS = "_predicted", "_clusters"
KMEANS_STARTS = 10
VALIDATION_CONTEXTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Scoring:
    """Whether expression and joint samples are scored, the column of labels, and settings of :class:`ComparisonConfig`."""

    expression: bool
    n_samples: int
    n_steps: int
    max_cells: int
    cell_type_key: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One configuration with one seed; ``settings`` has everything that determines its result, as JSON."""

    name: str
    seed: int
    split: Split
    model: dict[str, Any]
    train: dict[str, Any]
    settings: dict[str, Any]

    def execute(self, scoring: Scoring) -> dict[str, Any]:
        """Train and score the model."""
        import torch

        from alphastomics.model import AlphaSTomics
        from alphastomics.nn import count_parameters

        model = AlphaSTomics(self.split.reference, **self.model)
        recorder, failure = train(model, self.split.query, **self.train)
        count = count_parameters(model.module)
        last = recorder.points[-1] if recorder.points else None
        return {
            "configuration": self.name,
            "seed": self.seed,
            "held_out": self.split.held_out,
            "failure": failure,
            "parameters": count.total,
            "active_parameters": count.active,
            "d_model": model.module.config.d_model,
            "n_steps": model.trainer.global_step if hasattr(model, "trainer") else 0,
            "train_seconds": last.seconds if last else None,
            "step_seconds": recorder.step_seconds,
            "step_processor_seconds": recorder.step_processor_seconds,
            "train_loss": last.train_loss if last else None,
            "validation_loss": last.validation_loss if last else None,
            "curve": {name: [getattr(point, name) for point in recorder.points] for name in CURVE},
            "scores": {} if failure else score_model(model, self.split.query, scoring, seed=self.seed),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "settings": self.settings,
        }


# -- training ----------------------------------------------------------------------------------------------------------


def train(model: AlphaSTomics, query: AnnData, **arguments: Any) -> tuple[TrainingRecorder, str]:
    """Train a model and record its losses, also on held-out cells; a non-finite loss is returned as a message.

    Raises
    ------
    KeyboardInterrupt
        If training was interrupted, which Lightning reports as if it had finished.
    """
    import torch

    from alphastomics.train import NonFiniteLossError, TrainingRecorder

    recorder = TrainingRecorder(_validation_batches(model, query, arguments))
    callbacks = [*arguments.pop("callbacks", []), recorder]
    failure = ""
    try:
        model.train(callbacks=callbacks, **arguments)
    except (NonFiniteLossError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]  # infinite weights
        failure = str(error)
    if not failure and model.trainer.interrupted:
        raise KeyboardInterrupt
    return recorder, failure


def _validation_batches(model: AlphaSTomics, query: AnnData, arguments: Mapping[str, Any]) -> list[Batch]:
    """A few contexts of the held-out slices, the same for every configuration and seed."""
    from alphastomics.data import AnnDataSource, ContextDataset, collate

    source = AnnDataSource(query, model.schema, positions=True)
    size = arguments.get("context_size") or DEFAULT_CONTEXT_SIZE
    if size == "auto":
        size = max(len(cells.rows) for cells in source.slices)
    kind = arguments.get("context_kind", TrainingConfig.context_kind)
    dataset = ContextDataset(source, context_size=size, kind=kind, seed=0, targets=model.mode != "expr_to_pos")
    contexts: list[Context] = []
    for epoch in range(VALIDATION_CONTEXTS):
        dataset.set_epoch(epoch)
        contexts += [dataset[i] for i in range(min(len(dataset), VALIDATION_CONTEXTS - len(contexts)))]
    per_batch = max(1, (arguments.get("batch_size") or DEFAULT_BATCH_SIZE) // size)
    return [collate(contexts[i : i + per_batch]) for i in range(0, len(contexts), per_batch)]


# -- scores ------------------------------------------------------------------------------------------------------------


def score_model(model: AlphaSTomics, query: AnnData, scoring: Scoring, *, seed: int) -> Scores:
    """Scores of a trained model on every held-out slice."""
    schema, placed = model.schema, query.copy()
    reconstruct(placed, model=model, random_state=seed)
    parts = [_by_slice(evaluate(placed, truth=schema.position_key, **_library(schema)))]
    if scoring.expression:
        sampled = sample_expression(model, placed, scoring, seed=seed)
        parts.append(_by_slice(evaluate(sampled, prediction=None, **_expression_arguments(schema))))
        parts.append(_joint_scores(model, query, scoring, seed=seed))
    if scoring.cell_type_key in query.obs:
        parts.append(_embedding_scores(model, query, str(scoring.cell_type_key), seed=seed))
    return _merge(*parts)


def _embedding_scores(model: AlphaSTomics, query: AnnData, label_key: str, *, seed: int) -> Scores:
    """Scores of k-means clusters of the embeddings, as many clusters as there are labels."""
    labeled = query.copy()
    k = max(1, int(query.obs[label_key].nunique()))
    latent = model.get_latent_representation(without_cell_types(query, model))
    means = KMeans(min(k, len(latent)), n_init=KMEANS_STARTS, random_state=seed)
    labeled.obs[CLUSTERS] = means.fit_predict(latent).astype(str)
    table = cluster_scores(labeled, CLUSTERS, label_key=label_key, copy=True, **_library(model.schema))
    assert table is not None  # copy=True
    return _by_slice(table.drop(columns=["n_cells", "n_skipped"]))


def _joint_scores(model: AlphaSTomics, query: AnnData, scoring: Scoring, *, seed: int) -> Scores:
    """Agreement of a sampled slice with each held-out slice of equal size, at most ``max_cells``; none for very small ones."""
    schema, scores = model.schema, {}
    for name, rows in slice_rows(query, schema.slice_key):
        n_cells = min(len(rows), scoring.max_cells)
        if len(rows) < N_NEIGHBORS:
            continue
        sampled = model.sample(mode="joint", n_cells=n_cells, n_steps=scoring.n_steps, random_state=seed)
        table = modality_agreement(
            sampled, query[rows].copy(), spatial_key=schema.position_key, layer=schema.layer,
            transform=schema.transform, copy=True, random_state=seed, **_library(schema),
        )  # fmt: skip
        assert table is not None  # copy=True
        scores[name] = {_keys.MODALITY_AGREEMENT: float(table[_keys.MODALITY_AGREEMENT].mean())}
    return scores


def sample_expression(model: AlphaSTomics, placed: AnnData, scoring: Scoring, *, seed: int) -> AnnData:
    """Cells of every slice with ``layers[PREDICTED]``, the mean over draws of expression at their true positions.

    If every slice has its own frame, the true positions are first aligned with the predicted ones by a rigid map.
    """
    schema = model.schema
    result = _subsample(placed, schema, scoring.max_cells)
    true, predicted = (
        np.array(result.obsm[key], dtype=np.float64) for key in (schema.position_key, _keys.RECONSTRUCTED)
    )
    if schema.plane is not None:  # a rotation in 3D would tilt the plane
        true, predicted = (np.delete(x, schema.plane[0], axis=1) for x in (true, predicted))
    if schema.frame == "slice":
        for _, rows in slice_rows(result, schema.slice_key):
            true[rows] = rigid_align(true[rows], predicted[rows])[0]
    registered = result.copy()
    registered.obsm[schema.position_key] = true
    sampled = model.sample(
        registered,
        mode="pos_to_expr",
        n_samples=scoring.n_samples,
        n_steps=scoring.n_steps,
        reduce="mean" if scoring.n_samples > 1 else None,
        random_state=seed,
    )
    result.layers[PREDICTED] = sampled[:, result.var_names].X
    return result


def baseline_runs(split: Split, scoring: Scoring, seed: int) -> list[dict[str, Any]]:
    """Scores of ``chance`` and, if cell types are known, ``oracle``, in the form of runs."""
    schema, query = split.schema, split.query
    options: dict[str, Any] = {"baselines": True, "random_state": seed}
    kinds = ["chance"]
    if scoring.cell_type_key in query.obs:
        options["cell_type_key"] = scoring.cell_type_key
        kinds.append("oracle")
    key = schema.position_key  # also the prediction: only the rows of the baselines are kept
    tables = [evaluate(query, truth=key, prediction=key, **_library(schema), **options)]
    if scoring.expression:
        cells = _subsample(query, schema, scoring.max_cells)
        cells.layers[PREDICTED] = expression_matrix(cells, schema.layer).copy()
        tables.append(evaluate(cells, prediction=None, **_expression_arguments(schema), **options))
    empty: dict[str, Any] = dict.fromkeys((*SIZES, *MEASURES)) | {"failure": "", "curve": {name: [] for name in CURVE}}
    runs = []
    for kind in kinds:
        scores = _merge(*(_by_slice(table.xs(kind, level="positions")) for table in tables))
        runs.append(empty | {"configuration": kind, "seed": seed, "held_out": split.held_out, "scores": scores})
    return runs


def _subsample(query: AnnData, schema: TissueSchema, max_cells: int) -> AnnData:
    """At most ``max_cells`` of every slice, and the genes that the reference has too."""
    groups = slice_rows(query, schema.slice_key)
    rows = np.sort(np.concatenate([rows[subsample_cells(len(rows), max_cells, 0)] for _, rows in groups]))
    genes = query.var_names.intersection(pd.Index(schema.genes), sort=False)
    return query[rows, genes].copy()


def _library(schema: TissueSchema) -> dict[str, Any]:
    return {} if schema.slice_key is None else {"library_key": schema.slice_key}


def _expression_arguments(schema: TissueSchema) -> dict[str, Any]:
    keys = {"truth": schema.position_key, "layer": schema.layer, "expression_layer": PREDICTED}
    return _library(schema) | keys | {"transform": schema.transform}


def _by_slice(table: pd.DataFrame) -> Scores:
    return {str(name): {str(k): float(v) for k, v in row.items()} for name, row in table.iterrows()}


def _merge(*parts: Scores) -> Scores:
    return {name: {k: v for part in parts for k, v in part.get(name, {}).items()} for name in parts[0]}
