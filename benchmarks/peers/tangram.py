"""Tangram (Biancalani 2021, doi:10.1038/s41592-021-01264-7): a matrix M of cells x spots, a softmax along every row.

M maximizes the cosine similarity between Mᵀ S and G for every gene, with cells S and spots G, and brings the share of cells of a
spot near its share of molecules; ``map_cells_to_space(mode="cells")`` with its default arguments. Here the spots are the cells of
the reference. A cell is placed at its most probable spot, as in ``tangram.utils``, or at the mean position with weights M.

All query cells are placed together, so that the share of cells of a spot is that of the whole query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anndata as ad
import scanpy as sc
import tangram
from scipy import sparse

if TYPE_CHECKING:
    import numpy as np


def place(data: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Positions of the query cells, ``tangram`` at the most probable spot and ``tangram_mean`` at the mean."""
    query, reference = (ad.AnnData(sparse.csr_matrix(data[name])) for name in ("query", "reference"))
    if data["is_counts"]:
        for adata in (query, reference):
            sc.pp.normalize_total(adata)
    tangram.pp_adatas(query, reference)
    mapping = tangram.map_cells_to_space(query, reference, mode="cells", device="cpu", random_state=seed, verbose=False)
    probable = mapping.X.argmax(axis=1)
    return {"tangram": data["positions"][probable], "tangram_mean": mapping.X @ data["positions"]}
