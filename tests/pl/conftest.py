"""Cells with true and predicted positions."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy.sparse import csr_matrix

TURN = np.array([[0.0, 1.0], [1.0, 0.0]])  # a mirror image


@pytest.fixture
def adata() -> AnnData:
    """Two slices; the prediction is the truth in another frame."""
    rng = np.random.default_rng(0)
    true = rng.uniform(size=(60, 2)) * [4, 2]
    obs = pd.DataFrame(
        {
            "slice_id": np.repeat(["one", "two"], [40, 20]),
            "type": pd.Categorical(np.tile(["a", "b", "c"], 20)),
            "score": np.linspace(-1, 1, 60),
        },
        index=[f"cell{i}" for i in range(60)],
    )
    expression = csr_matrix(rng.poisson(2.0, size=(60, 3)).astype(np.float32))
    adata = AnnData(expression, obs=obs, var=pd.DataFrame(index=["Sox2", "Pax6", "Otx2"]))
    adata.obsm["spatial"] = true
    adata.obsm["spatial_reconstructed"] = true @ TURN + 30
    return adata
