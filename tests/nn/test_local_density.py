"""Where the denoiser reads how crowded a cell's surroundings are."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize(("t_pos", "seen"), [(0.0, True), (0.4, False), (1.0, False)])
def test_crowding_counts_where_positions_are_known(make_denoiser, make_inputs, t_pos, seen):
    """It is a function of clean positions, which a noisy or absent one must not betray."""
    denoiser, inputs = make_denoiser(), make_inputs()
    inputs = inputs._replace(t_pos=torch.full((3,), t_pos))
    local_density = torch.randn(3, 10, 9, generator=torch.Generator().manual_seed(0))
    without, one, other = (denoiser(*inputs, local_density=c).latent for c in (None, local_density, -local_density))
    assert torch.equal(one, other) != seen
    assert torch.equal(one, without) != seen
