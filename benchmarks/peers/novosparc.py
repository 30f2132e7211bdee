"""novoSpaRc (Nitzan 2019, doi:10.1038/s41586-019-1773-3): optimal transport of cells onto locations that have an atlas.

The plan P minimizes (1-α) Σ (C_ik - D_jl)² P_ij P_kl + α Σ M_ij P_ij - ε H(P), with graph distances C of cells and D of locations
and distances M between cells and atlas; α = .8, ε = .005 (a larger one after numerical errors) and 5 neighbors as in the
tutorial of the package. Here the atlas is the reference. A cell is placed at Σ_j P_ij x_j / Σ_j P_ij.

P and its costs are dense: parts of at most 2,000 query cells are placed one after the other.
"""

from __future__ import annotations

import warnings

import anndata as ad
import novosparc
import numpy as np
import scanpy as sc

ALPHA, EPSILON, NEIGHBORS = 0.8, 5e-3, 5
PART = 2000


def place(data: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Positions of the query cells; the seed has no effect."""
    # The package repeats a run with a larger ε if a warning of POT is printed; POT has warned through warnings since 0.8.
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_, **__: print(message)
    query, atlas = (_normalized(data[name], is_counts=bool(data["is_counts"])) for name in ("query", "reference"))
    n_parts = -(-len(query.X) // PART)
    parts = [
        _place(query[rows].copy(), atlas.X, data["positions"])
        for rows in np.array_split(np.arange(len(query)), n_parts)
    ]
    return {"novosparc": np.concatenate(parts)}


def _normalized(x: np.ndarray, *, is_counts: bool) -> ad.AnnData:
    adata = ad.AnnData(x.copy())
    if is_counts:
        sc.pp.normalize_total(adata)
        sc.pp.log1p(adata)
    return adata


def _place(query: ad.AnnData, atlas: np.ndarray, positions: np.ndarray) -> np.ndarray:
    tissue = novosparc.cm.Tissue(dataset=query, locations=positions)
    tissue.setup_reconstruction(
        atlas_matrix=atlas,
        markers_to_use=np.arange(query.n_vars),
        num_neighbors_s=NEIGHBORS,
        num_neighbors_t=NEIGHBORS,
        verbose=False,
    )
    tissue.reconstruct(alpha_linear=ALPHA, epsilon=EPSILON, verbose=False)
    return tissue.gw @ positions / tissue.gw.sum(axis=1, keepdims=True)
