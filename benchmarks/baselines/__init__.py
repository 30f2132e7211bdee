"""Baselines that place cells from their expression.

Every baseline is a function ``(reference, query, *, seed) -> positions``: ``reference`` has ``obsm["spatial"]`` and
``obs["slice_id"]``, ``query`` has expression only, the result is ``(n_query, n_dims)`` in units of the reference.
The same seed gives the same positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.baselines import contrastive, distance_mlp, knn_regression, optimal_transport

if TYPE_CHECKING:
    import numpy as np
    from anndata import AnnData
    from numpy.typing import NDArray


class Baseline(Protocol):
    """Places the cells of a query from a reference with positions."""

    def __call__(self, reference: AnnData, query: AnnData, *, seed: int) -> NDArray[np.float64]:
        """Positions of the query's cells, ``(n_query, n_dims)``."""


BASELINES: dict[str, Baseline] = {
    "knn_25": knn_regression.knn_25,
    "contrastive": contrastive.contrastive_knn,
    "distance_mlp": distance_mlp.distance_mlp,
    "optimal_transport": optimal_transport.optimal_transport,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "knn_25": knn_regression.PARAMETERS,
    "contrastive": contrastive.PARAMETERS,
    "distance_mlp": distance_mlp.PARAMETERS,
    "optimal_transport": optimal_transport.PARAMETERS,
}
"""What each baseline was run with; part of every saved entry, so that a change makes it run again."""

__all__ = ["BASELINES", "PARAMETERS", "Baseline"]
