"""Scores of predicted positions, and optionally of expression, clusters and niches, by slice."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from alphastomics._checks import check_counts
from alphastomics._keys import CELL_TYPE, RECONSTRUCTED, SPATIAL
from alphastomics.config import SetupConfig
from alphastomics.metrics import position_scores, spread_scores, subsample_cells
from alphastomics.metrics._neighbors import N_NEIGHBORS
from alphastomics.metrics._niches import N_NICHES
from alphastomics.tl._extras import ExtraScores
from alphastomics.tl._placed import PositionPair, cell_types, planar, read_slices, scored_cells, slice_key
from alphastomics.tl._tables import as_table, baseline_orders

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.config import Transform
    from alphastomics.tl._tables import Rows

logger = logging.getLogger(__name__)


def evaluate(
    adata: AnnData,
    *,
    truth: str = SPATIAL,
    prediction: str | None = RECONSTRUCTED,
    library_key: str | None = None,
    cell_type_key: str | None = None,
    baselines: bool = False,
    n_neighbors: int = N_NEIGHBORS,
    max_cells: int | None = None,
    random_state: int = 0,
    layer: str | None = None,
    expression_layer: str | None = None,
    transform: Transform = SetupConfig.transform,
    autocorrelation: bool = False,
    reference: AnnData | None = None,
    cluster_key: str | None = None,
    label_key: str = CELL_TYPE,
    niches: bool = False,
    n_niches: int = N_NICHES,
) -> pd.DataFrame:
    """Score predictions of one or several kinds against the truth, one row per slice.

    Positions are scored by default; `expression_layer`, `autocorrelation`, `reference`, `cluster_key` and `niches` add further
    scores.
    Only predicted positions are scored: cells for which ``obs[prediction + "_placed"]`` is False, if there is such a column,
    and cells without a true position (NaN) are skipped, as are cells without a predicted position because of ``min_confidence`` (NaN,
    with ``obs[prediction + "_confidence"]``); a message states their numbers. In slices with known positions, which fix the frame,
    ``aligned_rmsd``, ``rigid_rmsd`` and the scores of the uncertainty are computed without alignment. Nothing is written to
    `adata`.

    Parameters
    ----------
    adata
        Cells with true and predicted values.
    truth
        Key of ``obsm`` with the true positions, (n_cells, n_dims). A third column that is constant within each slice is left out if
        the predicted positions have two.
    prediction
        Key of ``obsm`` with the predicted positions, (n_cells, n_dims), in the units of the truth; a third column as in `truth`. None if
        positions were not predicted: position scores are left out, and the other scores use the positions under `truth`.
    library_key
        Column of ``obs`` with the slice of each cell. By default ``uns[prediction]["params"]["slice_key"]``, otherwise
        ``"slice_id"``; without such a column all cells form one slice.
    cell_type_key
        Column of ``obs`` with cell types, for the oracle and for `niches`. By default ``uns[prediction]["params"]["cell_type_key"]``.
    baselines
        Add rows for the baselines ``chance``, the true positions permuted over all cells, and, if cell types are known,
        ``oracle``, the true positions permuted within each cell type. Expression and clusters are permuted likewise.
    n_neighbors
        Number of neighbors for ``knn_preservation``, whose chance level is ``n_neighbors / (n_cells - 1)``, and for `niches`.
    max_cells
        Maximum number of cells of each slice to score; see :func:`alphastomics.metrics.subsample_cells`.
    random_state
        Seed of that selection, of the rows that ``distance_spearman`` samples, and of the baselines.
    layer
        Layer with the true expression; ``X`` when None.
    expression_layer
        Layer with predicted expression. Adds ``n_genes``, the scores of :func:`expression_scores`, and
        ``moran_correlation``.
    transform
        Scale on which expression is compared; see :func:`expression_scores`.
    autocorrelation
        Add ``moran_correlation``, the correlation over genes between Moran's I of the true expression on the true positions
        and Moran's I of the predicted expression (or the true one, without a prediction) on the predicted positions.
    reference
        Other, real slices with positions under the key `truth`. Adds ``modality_agreement``; see
        :func:`modality_agreement`.
    cluster_key
        Column of ``obs`` with clusters. Adds the scores of :func:`cluster_scores`.
    label_key
        Column of ``obs`` with the labels that clusters are compared with.
    niches
        Add the agreement of the cell types and of the niches around the true and the predicted positions, with ceilings; see
        :func:`alphastomics.metrics.niche_scores`. Cells without a type are left out.
    n_niches
        Number of niches.

    Returns
    -------
    A table indexed by ``slice`` or, with `baselines`, by ``slice`` and ``positions`` (``prediction``, ``chance`` or
    ``oracle``). Its columns are ``n_cells`` (scored cells), ``n_skipped`` (cells without a true or a predicted position), the scores of
    :func:`alphastomics.metrics.position_scores`, those of :func:`alphastomics.metrics.spread_scores` if the prediction has an
    uncertainty, and the further scores. Undefined scores, for example of a single cell, are NaN. The uncertainty is
    ``obs[prediction + "_uncertainty"]``. ``coverage``, ``spread_over_error`` and ``spread_spearman`` compare it with the error; they are
    NaN in the rows of the baselines.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If there is nothing to score, a position or expression value is invalid, the dimensions of true and predicted
        positions differ, or `niches` is true and cell types are not known.

    See Also
    --------
    position_scores, expression_scores, cluster_scores, modality_agreement

    Examples
    --------
    >>> asx.tl.reconstruct(query, reference)
    >>> asx.tl.evaluate(query, baselines=True, cell_type_key="cell_type")
    """
    if prediction is None and expression_layer is None and cluster_key is None and reference is None:
        raise ValueError(
            "there is nothing to score; pass prediction=…, expression_layer=…, cluster_key=… or reference=…"
        )
    pair = PositionPair.read(adata, truth, prediction, argument="truth")
    extras = ExtraScores.read(
        adata,
        truth=truth,
        prediction=prediction,
        layer=layer,
        expression_layer=expression_layer,
        transform=transform,
        autocorrelation=autocorrelation,
        reference=reference,
        library_key=None if reference is None else slice_key(adata, prediction, library_key),
        label_key=label_key,
        cluster_key=cluster_key,
        cell_type_key=cell_type_key,
        niches=niches,
        n_niches=n_niches,
        n_neighbors=n_neighbors,
        random_state=random_state,
    )
    return score_slices(
        adata,
        pair,
        extras=extras,
        library_key=library_key,
        cell_type_key=cell_type_key,
        baselines=baselines,
        n_neighbors=n_neighbors,
        max_cells=max_cells,
        random_state=random_state,
    )


def score_slices(
    adata: AnnData,
    pair: PositionPair,
    *,
    extras: ExtraScores | None = None,
    library_key: str | None,
    cell_type_key: str | None,
    baselines: bool,
    n_neighbors: int,
    max_cells: int | None,
    random_state: int,
) -> pd.DataFrame:
    """Scores of each slice; the arguments are those of :func:`evaluate`."""
    check_counts(n_neighbors=n_neighbors)
    if max_cells is not None:
        check_counts(max_cells=max_cells)
    types = cell_types(adata, pair.prediction, cell_type_key)
    score = partial(position_scores, n_neighbors=n_neighbors, max_cells=max_cells, random_state=random_state)
    rows: Rows = {}
    slices = read_slices(adata, pair.prediction, library_key)
    pair = pair.in_equal_dims(slices)
    for piece in slices:
        if len(piece.placed) == 0:
            continue
        cells = scored_cells(adata, piece, pair)
        true, predicted = planar(pair.true[cells], pair.predicted[cells], free=piece.free)
        chosen = np.arange(len(cells)) if max_cells is None else subsample_cells(len(cells), max_cells, random_state)
        counts = {"n_cells": min(len(cells), max_cells or len(cells)), "n_skipped": len(piece.placed) - len(cells)}
        orders: dict[str, NDArray[np.int64] | None] = {"prediction": None}
        if baselines:
            orders |= baseline_orders(len(cells), None if types is None else types[cells], random_state)
        for kind, order in orders.items():
            positions = predicted if order is None else true[order]
            row: dict[str, float] = {**counts}
            if pair.prediction is not None:
                row |= score(true, positions, align=piece.free)
            if pair.uncertainty is not None and order is None:
                u = pair.uncertainty[cells][chosen]
                row |= spread_scores(true[chosen], positions[chosen], u, align=piece.free)
            if extras is not None:
                row |= extras.score(cells, order, true, positions, chosen=chosen)
            rows[piece.name, kind] = row
    return _table(rows, pair, baselines=baselines)


def _table(rows: Rows, pair: PositionPair, *, baselines: bool) -> pd.DataFrame:
    if not any(row["n_cells"] for row in rows.values()):
        raise ValueError(
            f'no cell can be scored: no placed cell has a position in obsm["{pair.truth}"]; '
            f"pass the key of the true positions as {pair.argument}=…"
            if rows
            else f'no cell can be scored: there are no cells, or obs["{pair.prediction}_placed"] is False for all; pass placed cells'
        )
    table = as_table(rows, "positions", keep=True)
    skipped = int(table["n_skipped"].xs("prediction", level="positions").sum())
    if skipped:
        logger.info(
            '%d cells without a position in obsm["%s"] or obsm["%s"] were skipped; %d cells were not placed because of their '
            "confidence.",
            skipped,
            pair.truth,
            pair.prediction,
            int(pair.unplaced.sum()),
        )
    return table if baselines else table.droplevel("positions")
