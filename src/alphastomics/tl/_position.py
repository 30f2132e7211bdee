"""Scores of predicted positions by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alphastomics._keys import POSITION_SCORES, RECONSTRUCTED, SPATIAL
from alphastomics.metrics._neighbors import N_NEIGHBORS
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
    true position) and the scores of :func:`alphastomics.metrics.position_scores`.

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
