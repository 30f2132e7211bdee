"""Scores of predicted cell positions, with NumPy and SciPy only.

The scores share no code with ``alphastomics.metrics``, so that an error there cannot affect the benchmarks.

Scored cells: ``sort(default_rng(0).permutation(n)[:4000])`` of the held-out slice.

- ``knn_20``: mean share of the 20 true nearest neighbors among the 20 predicted ones, the cell itself excluded.
- ``distance_spearman``: Spearman correlation between the true and the predicted distances of a cell to the other cells, mean
  over 2,000 of the scored cells.
- ``aligned_rmsd``: root mean square deviation after the best rotation, reflection and scale, over the root mean square
  radius of the truth (1 = all cells at the center).
- ``contact_5``: share of the predicted closest 5 % of all pairs that are among the true closest 5 %.
- ``nn_ks``: Kolmogorov-Smirnov distance between the predicted and the true nearest-neighbor distances of all cells, in the
  units of the truth. Rigid alignment does not change these distances and is omitted; the scale is not fitted, because it
  determines the spacing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import cKDTree
from scipy.spatial.distance import cdist, pdist
from scipy.stats import ks_2samp, rankdata

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

N_SCORED = 4000
N_ROWS = 2000
K = 20
CONTACT_SHARE = 0.05
METRICS = ("knn_20", "distance_spearman", "aligned_rmsd", "contact_5", "nn_ks")
"""Names of the scores, in the order of the tables. ``aligned_rmsd`` and ``nn_ks`` are better when smaller."""


def score(truth: ArrayLike, predicted: ArrayLike) -> dict[str, float]:
    """Score predicted positions against true ones, cell by cell.

    Parameters
    ----------
    truth
        True positions, ``(n_cells, n_dims)``.
    predicted
        Predicted positions in the same order and the same shape, in any frame.

    Returns
    -------
    The scores named in :data:`METRICS`.

    Raises
    ------
    ValueError
        If the shapes differ or a value is not finite.
    """
    true, pred = np.asarray(truth, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    if true.shape != pred.shape:
        raise ValueError(f"truth has shape {true.shape}, the prediction {pred.shape}")
    if not (np.isfinite(true).all() and np.isfinite(pred).all()):
        raise ValueError("positions contain NaN or infinite values")
    idx = np.sort(np.random.default_rng(0).permutation(len(true))[:N_SCORED])
    rows = np.sort(np.random.default_rng(0).permutation(len(idx))[:N_ROWS])
    return {
        "knn_20": knn_preservation(true[idx], pred[idx], K),
        "distance_spearman": distance_spearman(true[idx][rows], pred[idx][rows]),
        "aligned_rmsd": aligned_rmsd(true[idx], pred[idx]),
        "contact_5": contact_precision(true[idx], pred[idx], CONTACT_SHARE),
        "nn_ks": nearest_neighbor_ks(true, pred),
    }


def chance_knn(n_cells: int) -> float:
    """Expected ``knn_20`` of a random arrangement of a slice of ``n_cells`` cells."""
    return K / (min(n_cells, N_SCORED) - 1)


def nearest_neighbors(positions: Array, k: int) -> NDArray[np.intp]:
    """Indices of the ``k`` nearest other cells of every cell, ``(n_cells, k)``, also if cells coincide."""
    n = len(positions)
    found = cKDTree(positions).query(positions, k=k + 1)[1]
    itself = found == np.arange(n)[:, None]
    # Among coinciding cells the tree may omit the cell itself; then the farthest one is dropped.
    itself[~itself.any(axis=1), -1] = True
    return found[~itself].reshape(n, k)


def knn_preservation(true: Array, pred: Array, k: int) -> float:
    """Mean fraction of the true ``k`` nearest neighbors among the predicted ``k`` nearest."""
    if len(true) <= k:
        raise ValueError(f"{len(true)} cells are too few for {k} neighbors")
    a, b = np.sort(nearest_neighbors(true, k), axis=1), np.sort(nearest_neighbors(pred, k), axis=1)
    offset = (np.arange(len(true)) * len(true))[:, None]
    return float(np.isin((a + offset).ravel(), (b + offset).ravel()).mean())


def distance_spearman(true: Array, pred: Array) -> float:
    """Spearman correlation between the rows of two distance matrices, own distance excluded, mean over the rows."""
    n = len(true)
    off_diagonal = ~np.eye(n, dtype=bool)
    ranks = []
    for positions in (true, pred):
        rank = rankdata(cdist(positions, positions)[off_diagonal].reshape(n, n - 1), axis=1)
        ranks.append(rank - rank.mean(axis=1, keepdims=True))
    norm = np.sqrt((ranks[0] ** 2).sum(1) * (ranks[1] ** 2).sum(1))
    covariance = (ranks[0] * ranks[1]).sum(1)
    # A row with equal distances scores 0.
    return float(np.divide(covariance, norm, out=np.zeros(n), where=norm > 0).mean())


def aligned_rmsd(true: Array, pred: Array) -> float:
    """Root mean square deviation after the best similarity transform, over the spread of the truth.

    With centered X (prediction) and Y (truth) and the singular values s of XᵀY, the least squares residual over |Y|² is
    1 - (Σ s)² / (|X|² |Y|²) (Schönemann 1966, Psychometrika 31:1).
    """
    x, y = pred - pred.mean(axis=0), true - true.mean(axis=0)
    norm = float((x**2).sum() * (y**2).sum())
    if norm == 0:
        return 1.0
    return float(np.sqrt(max(0.0, 1.0 - np.linalg.svd(x.T @ y, compute_uv=False).sum() ** 2 / norm)))


def contact_precision(true: Array, pred: Array, share: float) -> float:
    """Fraction of the predicted closest ``share`` of all pairs that is among the true closest ``share``."""
    true_distance, pred_distance = pdist(true), pdist(pred)
    m = max(1, round(share * len(true_distance)))
    close = true_distance <= np.partition(true_distance, m - 1)[m - 1]
    threshold = np.partition(pred_distance, m - 1)[m - 1]
    below, level = pred_distance < threshold, pred_distance == threshold
    # Pairs tied at the threshold fill the remaining places in proportion, so that a collapsed prediction scores chance.
    hits = close[below].sum() + (m - below.sum()) * close[level].mean()
    return float(hits / m)


def nearest_neighbor_ks(true: Array, pred: Array) -> float:
    """Kolmogorov-Smirnov distance between true and predicted distances to the nearest cell."""
    nearest = [cKDTree(positions).query(positions, k=2)[0][:, 1] for positions in (true, pred)]
    return float(ks_2samp(*nearest, method="asymp").statistic)  # the method concerns the p-value only


def rigid_fit(source: Array, target: Array) -> tuple[Array, Array]:
    """Rotation or reflection R and shift t that minimize ``|source @ R + t - target|²`` (Kabsch, reflection allowed)."""
    center, goal = source.mean(axis=0), target.mean(axis=0)
    u, _, vt = np.linalg.svd((source - center).T @ (target - goal))
    rotation = u @ vt
    return rotation, goal - center @ rotation
