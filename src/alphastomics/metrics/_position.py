"""All scores of predicted positions at once, and reference predictions (chance and oracle) to compare them with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphastomics._checks import check_seed
from alphastomics.metrics._align import aligned_rmsd, procrustes_disparity, rigid_rmsd
from alphastomics.metrics._distances import (
    CONTACT_SHARE,
    N_ROWS,
    check_pair,
    contact_precision,
    distance_matrix_mse,
    spearman_rows,
    subsample_cells,
)
from alphastomics.metrics._neighbors import N_NEIGHBORS, knn_preservation, nearest_neighbor_ks

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

SCORES = (
    "distance_spearman",
    "distance_spearman_median",
    "knn_preservation",
    "contact_precision",
    "aligned_rmsd",
    "procrustes_disparity",
    "distance_matrix_mse",
    "nearest_neighbor_ks",
    "rigid_rmsd",
)


def position_scores(
    true: ArrayLike,
    predicted: ArrayLike,
    *,
    n_neighbors: int = N_NEIGHBORS,
    contact_share: float = CONTACT_SHARE,
    max_cells: int | None = None,
    random_state: int = 0,
    align: bool = True,
) -> dict[str, float]:
    """Score predicted positions of one slice.

    Undefined scores are NaN: all scores for fewer than two cells, ``knn_preservation`` unless there are more cells than
    neighbors.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    predicted
        Predicted positions of the same cells, (n_cells, n_dims), in the units of the truth.
    n_neighbors
        Neighbors of :func:`knn_preservation`. Its chance level is ``n_neighbors / (n_cells - 1)``: compare it only between
        slices with equal numbers of cells.
    contact_share
        Fraction of the pairs that are contacts, for :func:`contact_precision`.
    max_cells
        If given, only the cells ``subsample_cells(n_cells, max_cells, random_state)`` are scored.
    random_state
        Seed of that choice and of the rows of :func:`distance_spearman`.
    align
        Passed to :func:`aligned_rmsd` and :func:`rigid_rmsd`; ``False`` if the two frames agree.

    Returns
    -------
    ``distance_spearman``, ``distance_spearman_median``, ``knn_preservation``, ``contact_precision``, ``aligned_rmsd``,
    ``procrustes_disparity``, ``distance_matrix_mse``, ``nearest_neighbor_ks`` and ``rigid_rmsd``, which allows a
    reflection in two dimensions only.

    Raises
    ------
    ValueError
        If the shapes differ or a value is not finite.
    """
    y, x = check_pair(true, predicted)
    if max_cells is not None:
        cells = subsample_cells(len(y), max_cells, random_state)
        y, x = y[cells], x[cells]
    if len(y) < 2:
        return dict.fromkeys(SCORES, float("nan"))
    spearman = spearman_rows(y, x, n_rows=N_ROWS, random_state=random_state)
    values = (
        float(spearman.mean()) if len(spearman) else float("nan"),
        float(np.median(spearman)) if len(spearman) else float("nan"),
        knn_preservation(y, x, n_neighbors=n_neighbors) if len(y) > n_neighbors else float("nan"),
        contact_precision(y, x, share=contact_share),
        aligned_rmsd(y, x, align=align),
        procrustes_disparity(y, x),
        distance_matrix_mse(y, x),
        nearest_neighbor_ks(y, x),
        rigid_rmsd(y, x, align=align),
    )
    return dict(zip(SCORES, values, strict=True))


def chance_positions(true: ArrayLike, random_state: int = 0) -> NDArray[np.float64]:
    """Permute the true positions over all cells: the chance level, a prediction from the outline of the slice alone.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    random_state
        Seed of the permutation.

    Returns
    -------
    The permuted positions, (n_cells, n_dims).
    """
    positions = np.asarray(true, dtype=np.float64)
    return positions[chance_order(len(positions), random_state)]


def oracle_positions(true: ArrayLike, cell_type: ArrayLike, random_state: int = 0) -> NDArray[np.float64]:
    """Permute the true positions within each cell type: a prediction from the cell types alone.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    cell_type
        Type of each cell, (n_cells,); cells without a type (NaN) form a group of their own.
    random_state
        Seed of the permutations.

    Returns
    -------
    The permuted positions, (n_cells, n_dims).

    Raises
    ------
    ValueError
        If there is not one type per cell.
    """
    positions = np.asarray(true, dtype=np.float64)
    return positions[oracle_order(len(positions), cell_type, random_state)]


def chance_order(n_cells: int, random_state: int) -> NDArray[np.int64]:
    """Random permutation of the cells, (n_cells,)."""
    return np.random.default_rng(check_seed(random_state)).permutation(n_cells)


def oracle_order(n_cells: int, cell_type: ArrayLike, random_state: int) -> NDArray[np.int64]:
    """Random permutation of the cells within each type, (n_cells,)."""
    codes = pd.factorize(np.asarray(cell_type, dtype=object))[0]
    if codes.shape != (n_cells,):
        raise ValueError(f"cell_type must name one type per cell, got {len(codes)} for {n_cells} cells")
    rng = np.random.default_rng(check_seed(random_state))
    order = np.empty(n_cells, dtype=np.int64)
    for code in np.unique(codes):
        cells = np.flatnonzero(codes == code)
        order[cells] = rng.permutation(cells)
    return order
