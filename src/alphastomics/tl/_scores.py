"""Compare clusters with labels, slice by slice.

Moran's I of genes, slice by slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphastomics import metrics
from alphastomics._keys import CELL_TYPE, CLUSTER_SCORES, MORAN, SPATIAL
from alphastomics.data._checks import check_key
from alphastomics.tl._expression import Transform, read_pair
from alphastomics.tl._tables import as_table, baseline_orders, library_slices, read_coordinates, store

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

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
        Cells with both; those that miss one are skipped and counted.
    cluster_key
        Column of ``obs`` with the cluster of each cell.
    label_key
        Column of ``obs`` with its known label.
    library_key
        Column of ``obs`` that names the slice of each cell; ``"slice_id"`` if it is there when None.
    baselines
        Add the row that gives a score its floor: ``chance``, the clusters shuffled over the cells. The ceiling is 1.
    key_added
        Where the table goes in ``uns``.
    copy
        Whether to return the table instead.
    random_state
        Seed of the baseline.

    Returns
    -------
    None, or the table. Its index is the slice; with `baselines`, the slice and ``prediction`` or ``chance`` (level
    ``clusters``; a column in ``uns``). Columns: ``n_cells`` that were scored, ``n_skipped``, and the scores of
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
    """Read both columns; a missing one is named with the argument that can change it."""
    for key, argument in ((label_key, "label_key"), (cluster_key, "cluster_key")):
        check_key("obs", adata.obs, key, argument)
    return adata.obs[label_key].to_numpy(dtype=object), adata.obs[cluster_key].to_numpy(dtype=object)


def morans_i(
    adata: AnnData,
    *,
    spatial_key: str = SPATIAL,
    layer: str | None = None,
    library_key: str | None = None,
    n_neighbors: int = 6,
    transform: Transform = "auto",
    key_added: str = MORAN,
    copy: bool = False,
) -> pd.DataFrame | None:
    """Spatial autocorrelation of every gene in every slice: Moran's I on the graph of nearest neighbors.

    To ask whether a prediction has the patterns of the tissue, call it with the predicted positions or the predicted
    layer too and compare; :func:`evaluate` does, with ``autocorrelation=True``.

    Parameters
    ----------
    adata
        Cells with expression and positions; those whose position is NaN are left out.
    spatial_key
        Where positions are in ``obsm``.
    layer
        Where expression is; ``X`` when None.
    library_key
        Column of ``obs`` that names the slice of each cell; ``"slice_id"`` if it is there when None.
    n_neighbors
        Neighbors of each cell.
    transform
        ``"log1p"`` at the median library size of the slice, ``"none"`` for values as they are, ``"auto"`` for
        ``"log1p"`` if and only if they are non-negative integers.
    key_added
        Where the table goes in ``uns``.
    copy
        Whether to return the table instead.

    Returns
    -------
    None, or the table: index slice and gene (in ``uns`` the gene is a column), column ``I``. It is NaN for genes that
    are constant or unmeasured in a slice, and for slices of no more than `n_neighbors` cells.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If a value cannot be used.
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
