"""Entropic optimal transport of the query cells onto the reference positions, with barycentric projection.

P = argmin <P, C> - ε H(P) with uniform marginals, C the squared distance in 50 principal components over its mean
(Sinkhorn; Cuturi 2013); a cell is placed at Σ_j P_ij x_j / Σ_j P_ij.

Memory: the plan is dense, n_query x n_reference. At most ``max_reference`` random reference cells are used, so that
7,661 cells take 0.25 GB per matrix instead of 1.1 GB; this is the only use of the seed.

Frames: all reference slices are aligned to the largest (:func:`._features.common_frame`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.baselines._features import common_frame, expression_features, principal_components

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

PARAMETERS: dict[str, Any] = {
    "scale": False,
    "n_components": 50,
    "max_reference": 4000,
    "epsilon": 0.02,
    "max_iterations": 500,
}


def optimal_transport(reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
    """Barycentric projection of the entropic plan between query and (a sample of) the reference."""
    return place(reference, query, seed=seed, **PARAMETERS)


def place(reference: AnnData, query: AnnData, *, seed: int, **p: Any) -> NDArray[np.float64]:
    """As :func:`optimal_transport`, with other parameters."""
    import ot

    ref, new = principal_components(
        *expression_features(reference, query, scale=p["scale"]), n_components=p["n_components"]
    )
    frame = common_frame(reference, ref)
    kept = np.sort(np.random.default_rng(seed).permutation(len(ref))[: p["max_reference"]])
    cost = ot.dist(new, ref[kept], metric="sqeuclidean")
    cost /= cost.mean()
    uniform = np.full(len(new), 1 / len(new)), np.full(len(kept), 1 / len(kept))
    plan = ot.sinkhorn(
        *uniform,
        cost,
        reg=p["epsilon"],
        method="sinkhorn_log",
        numItermax=p["max_iterations"],
        stopThr=1e-5,
        warn=False,
    )
    return plan @ frame[kept] / plan.sum(axis=1, keepdims=True)
