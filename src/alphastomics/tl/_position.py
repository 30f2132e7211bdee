"""Compare predicted with true positions, slice by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alphastomics._keys import POSITION_SCORES, RECONSTRUCTED, SPATIAL
from alphastomics.tl._evaluate import PositionPair, score_slices
from alphastomics.tl._tables import store

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData


def position_scores(
    adata: AnnData,
    prediction: str = RECONSTRUCTED,
    *,
    spatial_key: str = SPATIAL,
    library_key: str | None = None,
    cell_type_key: str | None = None,
    baselines: bool = False,
    n_neighbors: int = 20,
    max_cells: int | None = None,
    key_added: str = POSITION_SCORES,
    copy: bool = False,
    random_state: int = 0,
) -> pd.DataFrame | None:
    """Score predicted positions against the true ones, one row per slice.

    These are the scores that :func:`evaluate` begins with, kept in `adata`. Which cells count is the same: those that
    were placed and whose true position is known, and a slice with known cells, which fix its frame, is not aligned.

    Parameters
    ----------
    adata
        Cells with both positions.
    prediction
        Where predicted positions are in ``obsm``, in the units of the truth.
    spatial_key
        Where the true positions are in ``obsm``; cells where they are NaN are skipped and counted.
    library_key
        Column of ``obs`` that names the slice of each cell. By default the one that
        ``uns[prediction]["params"]["slice_key"]`` names, else ``obs["slice_id"]``, else all cells are one slice.
    cell_type_key
        Column of ``obs`` with cell types, for the oracle. By default the one that
        ``uns[prediction]["params"]["cell_type_key"]`` names, if any. Read with `baselines` only.
    baselines
        Add the rows that give a score its meaning: ``chance``, the true positions shuffled over the cells, and, where
        cell types are known, ``oracle``, the true positions shuffled within each type.
    n_neighbors
        Neighbors that ``knn_preservation`` compares; its chance level is ``n_neighbors / (n_cells - 1)``.
    max_cells
        Score at most this many cells of each slice (:func:`alphastomics.metrics.judge_cells`).
    key_added
        Where the table goes in ``uns``.
    copy
        Whether to return the table instead.
    random_state
        Seed of that choice, of the rows that ``distance_spearman`` samples, and of the baselines.

    Returns
    -------
    None, or the table. Its index is the slice; with `baselines`, the slice and ``prediction``, ``chance`` or
    ``oracle`` (level ``positions``; a column in ``uns``). Columns: ``n_cells`` that were scored, ``n_skipped``, and the
    scores of :func:`alphastomics.metrics.position_scores`.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If a predicted position to be scored is not finite, a true one is infinite, the two differ in dimension, or no
        cell can be scored.

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
