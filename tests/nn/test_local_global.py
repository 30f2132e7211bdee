"""Attention over neighbors and over everything at once."""

from __future__ import annotations

import torch

from alphastomics.nn.attention import LocalGlobalAttention
from alphastomics.nn.geometry import Geometry
from alphastomics.nn.neighbors import neighbor_pairs

N, H = 12, 2


def cells() -> tuple[LocalGlobalAttention, torch.Tensor, Geometry, torch.Tensor]:
    torch.manual_seed(0)
    module, x, position = LocalGlobalAttention(8, H), torch.randn(2, N, 8), torch.randn(2, N, 2)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, 9:] = False
    return module, x, Geometry(position, neighbors=neighbor_pairs(position, mask, k=3)), mask


def test_output_is_the_sum_of_both_and_zero_for_padding():
    module, x, geometry, mask = cells()
    y = module(x, geometry, mask)
    expected = module.near(x, geometry, mask) + module.all(x, geometry, mask)
    torch.testing.assert_close(y[mask], expected[mask])
    assert not bool(y[~mask].any())


def test_attention_matrix_is_the_mean_of_both():
    module, x, geometry, mask = cells()
    rows = torch.arange(N)
    weights = module.weights(x, rows, geometry, mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, N))
    parts = [part.weights(x, rows, geometry, mask) for part in (module.near, module.all)]
    torch.testing.assert_close(weights, (parts[0] + parts[1]) / 2)
    expected = torch.stack([weights[i][:, mask[i]].mean(1) for i in range(2)])
    torch.testing.assert_close(module.received(x, geometry, mask), expected)
    assert torch.equal(module.gates(x), module.near.gates(x))


def test_without_neighbors_every_cell_still_sees_all():
    module, x, geometry, _ = cells()
    alone = geometry._replace(position=None, neighbors=torch.full_like(geometry.neighbors, -1))
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(module(x, alone)[0, 0].sum(), x)
    assert bool(gradient[0].abs().sum(-1).gt(0).all())
    assert not bool(gradient[1].any())
