from __future__ import annotations

from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def make_adata() -> Callable[..., ad.AnnData]:
    """Counts of two slices in one sparse matrix, reproducible from a seed."""

    def make(
        n_cells: tuple[int, ...] = (60, 45), n_genes: int = 12, n_dims: int = 2, random_state: int = 0
    ) -> ad.AnnData:
        rng = np.random.default_rng(random_state)
        total = sum(n_cells)
        counts = rng.poisson(0.5 + rng.gamma(1.0, 2.0, size=n_genes), size=(total, n_genes))
        names = np.repeat([f"s{i}" for i in range(len(n_cells))], n_cells)
        adata = ad.AnnData(
            X=sp.csr_matrix(counts, dtype=np.float32),
            obs=pd.DataFrame({"slice_id": names, "label": names}, index=[f"c{i}" for i in range(total)]),
            var=pd.DataFrame(index=[f"g{i}" for i in range(n_genes)]),
        )
        offset = 100.0 * np.repeat(np.arange(len(n_cells)), n_cells)[:, None]
        adata.obsm["spatial"] = offset + rng.normal(size=(total, n_dims)) * np.arange(3, 3 + n_dims)
        # Mixed rows: slices are not contiguous in real files.
        return adata[rng.permutation(total)].copy()

    return make
