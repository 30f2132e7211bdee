"""Compare clusters with labels, slice by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from alphastomics._keys import CELL_TYPE, CLUSTER_SCORES
from alphastomics.data._checks import check_key
from alphastomics.metrics import cluster_scores as score
from alphastomics.tl._tables import as_table, baseline_orders, library_slices, store

if TYPE_CHECKING:
    import numpy as np
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
        rows[name, "prediction"] = counts | score(labels[cells], clusters[cells])
        if baselines:
            order = baseline_orders(len(cells), None, random_state)["chance"]
            rows[name, "chance"] = counts | score(labels[cells], clusters[cells][order])
    return store(adata, key_added, as_table(rows, "clusters", keep=baselines), copy=copy)


def read_clusters(adata: AnnData, label_key: str, cluster_key: str) -> tuple[NDArray[np.object_], NDArray[np.object_]]:
    """Read both columns; a missing one is named with the argument that can change it."""
    for key, argument in ((label_key, "label_key"), (cluster_key, "cluster_key")):
        check_key("obs", adata.obs, key, argument)
    return adata.obs[label_key].to_numpy(dtype=object), adata.obs[cluster_key].to_numpy(dtype=object)
