"""Scores of positions and clusters, and Moran's I of genes, by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphastomics import metrics
from alphastomics._checks import check_counts
from alphastomics._keys import CELL_TYPE, CLUSTER_SCORES, MORAN, POSITION_SCORES, RECONSTRUCTED, SPATIAL
from alphastomics.config import SetupConfig
from alphastomics.data._checks import check_type
from alphastomics.metrics._moran import N_NEIGHBORS as MORAN_NEIGHBORS
from alphastomics.metrics._neighbors import N_NEIGHBORS
from alphastomics.tl._evaluate import score_slices
from alphastomics.tl._expression import read_pair
from alphastomics.tl._placed import PositionPair
from alphastomics.tl._tables import as_table, baseline_orders, library_slices, read_clusters, read_coordinates, store

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.config import Transform
    from alphastomics.tl._tables import Rows


def cluster_scores(
    adata: AnnData,
    cluster_key: str,
    *,
    label_key: str = CELL_TYPE,
    library_key: str | None = None,
    baselines: bool = False,
    key_added: str = CLUSTER_SCORES,
    copy: bool = False,
    random_state: int = 0,
) -> pd.DataFrame | None:
    """Score clusters against known labels, one row per slice.

    Parameters
    ----------
    adata
        Cells with clusters and labels. Cells without one of them are skipped.
    cluster_key
        Column of ``obs`` with the clusters.
    label_key
        Column of ``obs`` with the known labels.
    library_key
        Column of ``obs`` with the slice of each cell. By default ``"slice_id"``; without such a column all cells form one
        slice.
    baselines
        Add rows for the baseline ``chance``, the clusters permuted over all cells. The maximum of the scores is 1.
    key_added
        Key of ``uns`` for the table.
    copy
        Return the table instead of writing it to `adata`.
    random_state
        Seed of the baseline.

    Returns
    -------
    None, or the table. It is indexed by ``slice`` or, with `baselines`, by ``slice`` and ``clusters`` (``prediction`` or
    ``chance``; a column in ``uns``). Its columns are ``n_cells`` (scored cells), ``n_skipped`` and the scores of
    :func:`alphastomics.metrics.cluster_scores`.

    Raises
    ------
    KeyError
        If a key is missing.

    Examples
    --------
    >>> asx.tl.cluster_scores(adata, "leiden", label_key="cell_type", baselines=True, copy=True)
    """
    check_type(adata)
    labels, clusters = read_clusters(adata, label_key, cluster_key)
    known = ~(pd.isna(labels) | pd.isna(clusters))
    rows: Rows = {}
    for name, everything in library_slices(adata, library_key):
        cells = everything[known[everything]]
        counts = {"n_cells": len(cells), "n_skipped": len(everything) - len(cells)}
        rows[name, "prediction"] = counts | metrics.cluster_scores(labels[cells], clusters[cells])
        if baselines:
            order = baseline_orders(len(cells), None, random_state)["chance"]
            rows[name, "chance"] = counts | metrics.cluster_scores(labels[cells], clusters[cells][order])
    return store(adata, key_added, as_table(rows, "clusters", keep=baselines), copy=copy)


def morans_i(
    adata: AnnData,
    *,
    spatial_key: str = SPATIAL,
    layer: str | None = None,
    library_key: str | None = None,
    n_neighbors: int = MORAN_NEIGHBORS,
    transform: Transform = SetupConfig.transform,
    key_added: str = MORAN,
    copy: bool = False,
) -> pd.DataFrame | None:
    """Compute Moran's I of every gene in every slice on the graph of nearest neighbors.

    The formula is that of :func:`alphastomics.metrics.morans_i`. :func:`evaluate` with ``autocorrelation=True`` compares
    Moran's I of predicted and true tissue.

    Parameters
    ----------
    adata
        Cells with expression and positions. Cells whose position is NaN are left out.
    spatial_key
        Key of ``obsm`` with the positions, (n_cells, n_dims).
    layer
        Layer with the expression; ``X`` when None.
    library_key
        Column of ``obs`` with the slice of each cell. By default ``"slice_id"``; without such a column all cells form one
        slice.
    n_neighbors
        Number of neighbors of each cell.
    transform
        ``"log1p"`` at the median library size of the slice, ``"none"`` for untransformed values, ``"auto"`` for ``"log1p"``
        if the values are counts.
    key_added
        Key of ``uns`` for the table.
    copy
        Return the table instead of writing it to `adata`.

    Returns
    -------
    None, or the table. It is indexed by ``slice`` and ``gene`` (a column in ``uns``) and has the column ``I``, which is NaN
    for genes that are constant or unmeasured in a slice, and for slices with at most `n_neighbors` cells.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If a value is not finite, values for log1p are negative, or no cell has a position.

    Examples
    --------
    >>> asx.tl.morans_i(adata)
    >>> adata.uns["morans_i"].nlargest(10, "I")
    """
    check_counts(n_neighbors=n_neighbors)
    pair = read_pair(adata, None, layer=layer, prediction_layer=None, transform=transform)
    positions = read_coordinates(adata, spatial_key, "spatial_key")
    tables = {}
    unknown: NDArray[np.bool_] = np.any(np.isnan(positions), axis=1)
    if unknown.all():
        raise ValueError(f'no cell has a position in obsm["{spatial_key}"]; pass another spatial_key=…')
    for name, rows in library_slices(adata, library_key):
        cells = rows[~unknown[rows]]
        values = pd.Series(np.nan, index=pd.Index(pair.genes, name="gene"), name="I")
        if len(cells) > n_neighbors:
            expression, _, measured = pair.scaled(cells)
            values[measured] = metrics.morans_i(expression, positions[cells], n_neighbors=n_neighbors)
        tables[name] = values.to_frame()
    return store(adata, key_added, pd.concat(tables, names=["slice"]), copy=copy)


def position_scores(
    adata: AnnData,
    prediction: str = RECONSTRUCTED,
    *,
    spatial_key: str = SPATIAL,
    library_key: str | None = None,
    cell_type_key: str | None = None,
    baselines: bool = False,
    n_neighbors: int = N_NEIGHBORS,
    max_cells: int | None = None,
    key_added: str = POSITION_SCORES,
    copy: bool = False,
    random_state: int = 0,
) -> pd.DataFrame | None:
    """Score predicted positions against the true ones, one row per slice.

    The scores and the scored cells are those of :func:`evaluate`; the table is written to `adata`.

    Parameters
    ----------
    adata
        Cells with true and predicted positions.
    prediction
        Key of ``obsm`` with the predicted positions, (n_cells, n_dims), in the units of the truth.
    spatial_key
        Key of ``obsm`` with the true positions, (n_cells, n_dims). Cells whose position is NaN are skipped.
    library_key
        Column of ``obs`` with the slice of each cell. By default ``uns[prediction]["params"]["slice_key"]``, otherwise
        ``"slice_id"``; without such a column all cells form one slice.
    cell_type_key
        Column of ``obs`` with cell types, for the oracle. By default ``uns[prediction]["params"]["cell_type_key"]``.
    baselines
        Add rows for the baselines ``chance``, the true positions permuted over all cells, and, if cell types are known,
        ``oracle``, the true positions permuted within each cell type.
    n_neighbors
        Number of neighbors for ``knn_preservation``, whose chance level is ``n_neighbors / (n_cells - 1)``.
    max_cells
        Maximum number of cells of each slice to score; see :func:`alphastomics.metrics.subsample_cells`.
    key_added
        Key of ``uns`` for the table.
    copy
        Return the table instead of writing it to `adata`.
    random_state
        Seed of that selection, of the rows that ``distance_spearman`` samples, and of the baselines.

    Returns
    -------
    None, or the table. It is indexed by ``slice`` or, with `baselines`, by ``slice`` and ``positions`` (``prediction``,
    ``chance`` or ``oracle``; a column in ``uns``). Its columns are ``n_cells`` (scored cells), ``n_skipped`` (cells without a
    true or a predicted position), the scores of :func:`alphastomics.metrics.position_scores` and, if the prediction has an uncertainty,
    those of :func:`alphastomics.metrics.spread_scores`.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If no cell can be scored, a position is invalid, or the dimensions of true and predicted positions differ.

    Examples
    --------
    >>> asx.tl.position_scores(adata, baselines=True, cell_type_key="cell_type", copy=True)
    """
    table = score_slices(
        adata,
        PositionPair.read(adata, spatial_key, prediction, argument="spatial_key"),
        library_key=library_key,
        cell_type_key=cell_type_key,
        baselines=baselines,
        n_neighbors=n_neighbors,
        max_cells=max_cells,
        random_state=random_state,
    )
    return store(adata, key_added, table, copy=copy)
