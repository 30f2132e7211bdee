"""Scores of neighborhoods: preserved neighbors, and the distribution of nearest-neighbor distances."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import KDTree
from scipy.spatial.distance import cdist
from scipy.stats import ks_2samp

from alphastomics.metrics._distances import TIE_TOLERANCE, check_pair, row_chunks

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

N_NEIGHBORS = 20


def knn_preservation(true: ArrayLike, predicted: ArrayLike, *, n_neighbors: int = N_NEIGHBORS) -> float:
    """Mean fraction of the true nearest neighbors of a cell that are among its predicted nearest neighbors.

    A cell is never its own neighbor; it is excluded by its index, so that cells may share a position. Where several
    cells are tied for the last places, the score is its expectation over random tie-breaking. So a prediction that is a
    single point scores chance, ``n_neighbors / (n_cells - 1)``, for any order of the cells, and on a grid, where the true
    neighbors are tied, even a perfect prediction scores below 1.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    predicted
        Predicted positions of the same cells, (n_cells, n_dims), in any unit.
    n_neighbors
        Number of neighbors, at least 1 and less than the number of cells.

    Returns
    -------
    The fraction, in [0, 1].

    Raises
    ------
    ValueError
        If the shapes differ, a value is not finite, or there are not more cells than ``n_neighbors``.
    """
    y, x = check_pair(true, predicted)
    n = len(y)
    if not 1 <= n_neighbors < n:
        raise ValueError(f"n_neighbors={n_neighbors} must be at least 1 and less than the number of cells, {n}")
    true_neighbors, true_tied = nearest_cells(y, n_neighbors)
    predicted_neighbors, predicted_tied = nearest_cells(x, n_neighbors)
    both = np.sort(np.concatenate([true_neighbors, predicted_neighbors], axis=1), axis=1)
    shared = (both[:, 1:] == both[:, :-1]).sum(axis=1).astype(np.float64)
    tied = np.flatnonzero(true_tied | predicted_tied)
    for rows in row_chunks(len(tied), n):
        cells = tied[rows]
        shares = neighbor_probability(y, cells, n_neighbors), neighbor_probability(x, cells, n_neighbors)
        shared[cells] = np.einsum("ij,ij->i", *shares)
    return float(shared.mean()) / n_neighbors


def nearest_cells(
    positions: NDArray[np.float64], k: int, among: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Find the k nearest other cells of each, (n, k), and whether the k-th is tied with the next one, (n,).

    If given, only the cells ``among`` (m,) are candidates.
    """
    n = len(positions)
    candidates = np.arange(n) if among is None else among
    distances, neighbors = KDTree(positions[candidates]).query(positions, k=k + 2)
    neighbors = np.append(candidates, n)[neighbors]  # n where there are fewer than k + 2 candidates
    distances, neighbors = without_itself(distances, neighbors)
    return neighbors[:, :k], distances[:, k] <= distances[:, k - 1] * (1 + TIE_TOLERANCE)


def without_itself(
    distances: NDArray[np.float64], neighbors: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Remove cell i from row i of distances and indices of its nearest cells, both (n, k + 1); the last where it is absent.

    It is found by its index: cells may share a position.
    """
    n = len(neighbors)
    keep = neighbors != np.arange(n)[:, None]
    keep[keep.all(axis=1), -1] = False  # more than k cells share the position, or it is no candidate
    return distances[keep].reshape(n, -1), neighbors[keep].reshape(n, -1)


def neighbor_probability(
    positions: NDArray[np.float64], cells: NDArray[np.int64], k: int, among: NDArray[np.int64] | None = None
) -> NDArray[np.float64]:
    """Probability (S, n) that each cell is among the k nearest of ``cells`` (S,) if ties are broken at random.

    If given, only the cells ``among`` (m,) are candidates.
    """
    distances = cdist(positions[cells], positions)
    distances[np.arange(len(cells)), cells] = np.inf
    if among is not None:
        distances[:, np.setdiff1d(np.arange(len(positions)), among)] = np.inf
    last = np.partition(distances, k - 1, axis=1)[:, k - 1 : k]
    nearer = distances < last * (1 - TIE_TOLERANCE)
    tied = ~nearer & (distances <= last * (1 + TIE_TOLERANCE))
    return nearer + tied * ((k - nearer.sum(axis=1)) / tied.sum(axis=1))[:, None]


def nearest_neighbor_ks(true: ArrayLike, predicted: ArrayLike) -> float:
    """Kolmogorov–Smirnov distance between the true and the predicted distribution of nearest-neighbor distances.

    The distance compares the density and the regularity of the cells, not the position of each cell. It equals
    ``scipy.stats.ks_2samp(...).statistic`` of the distances rounded to 1e-9 of the largest true one; without rounding, the
    equal distances of a grid would differ by the rounding errors of a rotation.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    predicted
        Predicted positions of the same cells, (n_cells, n_dims), in the units of the truth; they are not rescaled.

    Returns
    -------
    The distance, in [0, 1], 0 for equal distributions; NaN for fewer than two cells.

    Raises
    ------
    ValueError
        If the shapes differ or a value is not finite.
    """
    y, x = check_pair(true, predicted)
    if len(y) < 2:
        return float("nan")
    # The first of the two nearest is the cell itself, or another cell at the same position.
    nearest = [KDTree(positions).query(positions, k=2)[0][:, 1] for positions in (y, x)]
    unit = nearest[0].max() or 1.0
    return float(ks_2samp(*(np.round(distances / unit, 9) for distances in nearest), method="asymp").statistic)
