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

N_COMPONENTS = 50


def parameters(n_neighbors: int, *, scale: bool) -> dict[str, Any]:
    """What a variant is run with."""
    return {"n_components": N_COMPONENTS, "n_neighbors": n_neighbors, "scale": scale}


def place(reference: AnnData, query: AnnData, *, seed: int, **p: Any) -> NDArray[np.float64]:
    """Mean position of the nearest reference cells in the space of principal components."""
    ref, new = principal_components(
        *expression_features(reference, query, scale=p["scale"]), n_components=p["n_components"]
    )
    return common_frame(reference, ref)[nearest(ref, new, n_neighbors=p["n_neighbors"])].mean(axis=1)


def knn_25(reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
    """25 neighbors, genes of unit variance."""
    return place(reference, query, seed=seed, **parameters(25, scale=True))


def knn_30(reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
    """30 neighbors, genes of unit variance."""
    return place(reference, query, seed=seed, **parameters(30, scale=True))


def knn_30_unscaled(reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
    """30 neighbors, genes with the variance they have."""
    return place(reference, query, seed=seed, **parameters(30, scale=False))
