"""Scores of clusters against labels, and Moran's I of genes, by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphastomics import metrics
from alphastomics._keys import CELL_TYPE, CLUSTER_SCORES, MORAN, SPATIAL
from alphastomics.data._checks import check_key
from alphastomics.metrics._moran import N_NEIGHBORS
from alphastomics.tl._expression import read_pair
from alphastomics.tl._tables import as_table, baseline_orders, library_slices, read_coordinates, store

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
    """
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


def read_clusters(adata: AnnData, label_key: str, cluster_key: str) -> tuple[NDArray[np.object_], NDArray[np.object_]]:
    """Labels and clusters of all cells, (n_cells,) each."""
    for key, argument in ((label_key, "label_key"), (cluster_key, "cluster_key")):
        check_key("obs", adata.obs, key, argument)
    return adata.obs[label_key].to_numpy(dtype=object), adata.obs[cluster_key].to_numpy(dtype=object)


def morans_i(
    adata: AnnData,
    *,
    spatial_key: str = SPATIAL,
    layer: str | None = None,
    library_key: str | None = None,
    n_neighbors: int = N_NEIGHBORS,
    transform: Transform = "auto",
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
        if all values are non-negative integers.
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
        If a value is not finite, or values for log1p are negative.
    """
    pair = read_pair(adata, None, layer=layer, prediction_layer=None, transform=transform)
    positions = read_coordinates(adata, spatial_key, "spatial_key")
    tables = {}
    for name, rows in library_slices(adata, library_key):
        cells = rows[~np.isnan(positions[rows]).any(axis=1)]
        values = pd.Series(np.nan, index=pd.Index(pair.genes, name="gene"), name="I")
        if len(cells) > n_neighbors:
            expression, _, measured = pair.scaled(cells)
            values[measured] = metrics.morans_i(expression, positions[cells], n_neighbors=n_neighbors)
        tables[name] = values.to_frame()
    return store(adata, key_added, pd.concat(tables, names=["slice"]), copy=copy)
