"""The frame-aligned point error of the objective: in a shared frame, a reflected prediction is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from alphastomics.config import PlanConfig
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.train.objective import Objective


@pytest.mark.parametrize("shared_frame", [True, False])
def test_a_reflection_is_an_error_in_a_shared_frame_only(shared_frame):
    network = Denoiser(DenoiserConfig(n_genes=4, n_dims=3, d_model=16, n_heads=2, n_layers=1, sequence=True))
    objective = Objective(network, PlanConfig(lambda_fape=1.0), shared_frame=shared_frame, spacing=1.0)
    steps = torch.randn(1, 20, 3, generator=torch.Generator().manual_seed(0))
    position = torch.nn.functional.normalize(steps, dim=-1).cumsum(1)
    batch = SimpleNamespace(mask=torch.ones(1, 20, dtype=torch.bool), sequence=torch.arange(20.0)[None, :, None])
    reflected = position * torch.tensor([1.0, 1.0, -1.0])
    losses = [objective._chain_losses(x, position, batch, torch.tensor([0])).item() for x in (position, reflected)]
    assert losses[0] < 1e-4
    assert (losses[1] > 0.1) == shared_frame
