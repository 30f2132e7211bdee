"""Attention between the sides against its equations, rank by rank."""

from __future__ import annotations

import pytest
import torch

from alphastomics.nn.pair import FactorCrossAttention


def make(max_rank: int = 5) -> FactorCrossAttention:
    torch.manual_seed(0)
    module = FactorCrossAttention(8, 2, max_rank).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.4 * torch.randn_like(parameter)
    return module


def linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.mT + layer.bias


def norm(layer: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    return x * layer.weight + layer.bias


def one_side(side: torch.nn.Module, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """``x`` (N, C) after it looked at ``other``: one rank of one context."""
    q = linear(side.query, norm(side.norm, x))
    k, v = linear(side.key_value, norm(side.other_norm, other)).chunk(2, dim=-1)
    heads = [(q[:, p] @ k[:, p].mT / 2).softmax(-1) @ v[:, p] for p in (slice(4), slice(4, 8))]
    z = linear(side.out, torch.cat(heads, -1))
    return x + linear(side.gate, torch.cat([x, z], -1)).sigmoid() * z


def test_sides_attend_to_each_other_rank_by_rank(make_factors, mask):
    module, factors = make(), make_factors(rank=3, mask=mask)
    after = module(factors)
    for context, cells in enumerate(mask):
        left, right = (x[context][:, cells].permute(2, 1, 0) for x in factors[:2])  # (R, N, C)
        pairs = list(zip(left, right, strict=True))
        new_left = torch.stack([one_side(module.left, x, y) for x, y in pairs])
        new_right = torch.stack([one_side(module.right, y, x) for x, y in pairs])
        for actual, new, mix in ((after.left, new_left, module.mix[0]), (after.right, new_right, module.mix[1])):
            mixed = new + torch.einsum("rnc,rs->snc", new, mix[:3, :3])
            torch.testing.assert_close(actual[context][:, cells], mixed.permute(2, 1, 0))


def test_at_first_nothing_changes(make_factors):
    factors = make_factors()
    after = FactorCrossAttention(8, 2, 3).double()(factors)
    assert torch.equal(after.left, factors.left)
    assert torch.equal(after.right, factors.right)


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="n_channels=8"):
        FactorCrossAttention(8, 3, 4)
