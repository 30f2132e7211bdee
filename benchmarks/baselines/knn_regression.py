"""Nearest-neighbor regression: a cell is placed at the mean position of the reference cells with the most similar expression.

Frames: all reference slices are aligned to the largest (:func:`._features.common_frame`).
The method is deterministic: every seed gives the same positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.baselines._features import common_frame, expression_features, nearest, principal_components

if TYPE_CHECKING:
    import numpy as np
    from anndata import AnnData
    from numpy.typing import NDArray

PARAMETERS: dict[str, Any] = {"n_components": 50, "n_neighbors": 25, "scale": True}


def knn_25(reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
    """Mean position of the nearest reference cells in the space of principal components, genes of unit variance."""
    ref, new = principal_components(
        *expression_features(reference, query, scale=PARAMETERS["scale"]), n_components=PARAMETERS["n_components"]
    )
    return common_frame(reference, ref)[nearest(ref, new, n_neighbors=PARAMETERS["n_neighbors"])].mean(axis=1)
