"""Nearest-neighbour regression: a cell sits at the mean position of the reference cells with the most similar expression.

Frames: all reference slices are brought into the frame of the largest (:func:`._features.common_frame`).
Nothing is random: every seed gives the same positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from scipy.spatial import cKDTree

from benchmarks.baselines._features import common_frame, principal_components, scaled_expression

if TYPE_CHECKING:
    import numpy as np
    from anndata import AnnData
    from numpy.typing import NDArray

PARAMETERS: dict[str, Any] = {"n_components": 50}


def _knn(reference: AnnData, query: AnnData, n_neighbours: int) -> NDArray[np.float64]:
    ref, new = principal_components(*scaled_expression(reference, query), **PARAMETERS)
    nearest = cKDTree(ref).query(new, k=n_neighbours)[1]
    return common_frame(reference, ref)[nearest].mean(axis=1)


def knn_25(reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
    """Mean position of the 25 nearest reference cells in the space of 50 principal components."""
    return _knn(reference, query, 25)


def knn_30(reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
    """Mean position of the 30 nearest reference cells in the space of 50 principal components."""
    return _knn(reference, query, 30)
