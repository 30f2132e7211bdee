"""How a compared model is scored: where it places held-out cells, what it writes into their places, how it embeds and draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.cluster import KMeans

from alphastomics import _keys
from alphastomics.data._checks import expression_matrix
from alphastomics.data._slices import slice_rows
from alphastomics.metrics import judge_cells, rigid_align
from alphastomics.tl._agreement import modality_agreement
from alphastomics.tl._clusters import cluster_scores
from alphastomics.tl._evaluate import evaluate
from alphastomics.tl._reconstruct import reconstruct

if TYPE_CHECKING:
    from anndata import AnnData

    from alphastomics.data import TissueSchema
    from alphastomics.model import AlphaSTomics

    Scores = dict[str, dict[str, float]]

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
    labelled = query.copy()
    k = max(1, int(query.obs[label_key].nunique()))
    latent = model.get_latent_representation(query)
    means = KMeans(min(k, len(latent)), n_init=KMEANS_STARTS, random_state=seed)
    labelled.obs[CLUSTERS] = means.fit_predict(latent).astype(str)
    table = cluster_scores(labelled, CLUSTERS, label_key=label_key, copy=True, **_library(model.schema))
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
