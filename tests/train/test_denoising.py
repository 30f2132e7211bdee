"""Is it a diffusion, or a regression in a diffusion's clothes? A probe on a tiny trained network.

Given a noisy context, the estimate of the clean positions must be nearer to the truth than the noisy positions
themselves (copying the input) and than the estimate without any positions (ignoring the input).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from alphastomics.data import AnnDataSource, Augmentation, ContextDataset, collate, fit_schema
from alphastomics.datasets import synthetic_tissue
from alphastomics.diffusion.geometry import align, centre, kabsch, random_rotation, rotate
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.train import TrainingPlan

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.data import Batch

pytestmark = pytest.mark.slow

RATIOS = (0.1, 0.3, 1.0)


@pytest.fixture(scope="module")
def source() -> AnnDataSource:
    adata = synthetic_tissue(n_slices=3, n_cells=250, n_genes=60, random_state=0)
    return AnnDataSource(adata, fit_schema(adata), positions=True)


@pytest.fixture(scope="module")
def batch(source) -> Batch:
    """The training slices themselves, whole and unchanged."""
    dataset = ContextDataset(source, context_size=250, seed=1)
    return collate([dataset[i] for i in range(len(dataset))])
