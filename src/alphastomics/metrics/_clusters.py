"""Scores of a clustering against known labels, invariant to the names of clusters and labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.metrics.cluster import contingency_matrix

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

CLUSTER_SCORES = ("adjusted_rand", "normalized_mutual_information", "matched_accuracy")


def matched_accuracy(labels: ArrayLike, clusters: ArrayLike) -> float:
    r"""Fraction of the cells whose cluster is matched to their label, under the best one-to-one matching.

    .. math::

        \max_{\pi} \frac1n \sum_i [\pi(c_i) = l_i]

    over all injections :math:`\pi` between clusters and labels, by the Hungarian method on their contingency table
    (:func:`scipy.optimize.linear_sum_assignment`). If clusters and labels differ in number, the cells of unmatched clusters or
    labels count as wrong.

    Parameters
    ----------
    labels
        Known label of each cell, (n_cells,).
    clusters
        Cluster of each cell, (n_cells,).

    Returns
    -------
    The fraction, in (0, 1]; NaN if there are no cells.

    Raises
    ------
    ValueError
        If the two differ in length, or a value is missing.
    """
    return _matched_accuracy(*_codes(labels, clusters))


def cluster_scores(labels: ArrayLike, clusters: ArrayLike) -> dict[str, float]:
    """Score a clustering against known labels.

    Parameters
    ----------
    labels
        Known label of each cell, (n_cells,).
    clusters
        Cluster of each cell, (n_cells,).

    Returns
    -------
    ``adjusted_rand`` (``sklearn.metrics.adjusted_rand_score``, 0 for chance, 1 for equal partitions),
    ``normalized_mutual_information`` (``sklearn.metrics.normalized_mutual_info_score``, arithmetic mean; chance is
    above 0 and grows with the number of clusters) and ``matched_accuracy`` (:func:`matched_accuracy`); NaN if there are no
    cells.

    Raises
    ------
    ValueError
        If the two differ in length, or a value is missing.
    """
    y, x = _codes(labels, clusters)
    if not len(y):
        return dict.fromkeys(CLUSTER_SCORES, float("nan"))
    values = (adjusted_rand_score(y, x), normalized_mutual_info_score(y, x), _matched_accuracy(y, x))
    return {name: float(value) for name, value in zip(CLUSTER_SCORES, values, strict=True)}


def _codes(labels: ArrayLike, clusters: ArrayLike) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Labels and clusters as integer codes."""
    pair = [np.asarray(values, dtype=object) for values in (labels, clusters)]
    if pair[0].ndim != 1 or pair[0].shape != pair[1].shape:
        raise ValueError(f"labels and clusters must both be of shape (n_cells,), got {pair[0].shape}, {pair[1].shape}")
    codes = [pd.factorize(values)[0] for values in pair]
    for name, values in zip(("labels", "clusters"), codes, strict=True):
        n_missing = int((values < 0).sum())
        if n_missing:
            raise ValueError(f"{n_missing} {name} are missing; leave these cells out")
    return codes[0], codes[1]


def _matched_accuracy(labels: NDArray[np.intp], clusters: NDArray[np.intp]) -> float:
    if not len(labels):
        return float("nan")
    table = contingency_matrix(labels, clusters)
    return float(table[linear_sum_assignment(table, maximize=True)].sum() / len(labels))
