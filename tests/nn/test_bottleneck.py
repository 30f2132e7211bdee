"""The narrow branch against its formula, alone and around an attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from alphastomics.nn import SoftmaxAttention
from alphastomics.nn.block import Bottleneck
from alphastomics.nn.residual import HyperConnection, expand, reduce


def trained(*, attention: bool = False) -> Bottleneck:
    layer = Bottleneck(16, ratio=4, operation=SoftmaxAttention(4, 2) if attention else None)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.double()


@pytest.mark.parametrize("attention", [False, True])
def test_a_layer_matches_the_formula(attention):
    layer, x = trained(attention=attention), torch.randn(2, 5, 16, dtype=torch.float64)
    norm = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
    h = (norm * layer.norm.weight + layer.norm.bias) @ layer.down.weight.T + layer.down.bias
    h = layer.operation(h) if attention else h * (1 + torch.erf(h / 2**0.5)) / 2
    branch = h @ layer.up.weight.T + layer.up.bias
    torch.testing.assert_close(layer.branch(x), branch)
    torch.testing.assert_close(layer(x), x + branch)


def test_at_first_the_layer_is_the_identity():
    x = torch.randn(2, 5, 16)
    assert torch.equal(Bottleneck(16)(x), x)


@given(seed=st.integers(0, 1000), attention=st.booleans())
def test_padding_is_zero_and_neither_it_nor_order_changes_anything(seed, attention):
    torch.manual_seed(seed)
    layer, x = trained(attention=attention), torch.randn(2, 6, 16, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    y = layer(x, mask)
    assert not bool(y[~mask].any())
    torch.testing.assert_close(y[1:, :4], layer(x[1:, :4]))
    order = torch.randperm(6)
    torch.testing.assert_close(layer(x[:, order], mask[:, order]), y[:, order])


@pytest.mark.parametrize("attention", [False, True])
def test_all_parameters_learn(attention):
    layer = Bottleneck(16, operation=SoftmaxAttention(4, 2) if attention else None)
    x, target = torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    seen = {name: 0.0 for name, _ in layer.named_parameters()}
    for _ in range(5):
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            seen[name] += float(parameter.grad.abs().max())
        optimizer.step()
    assert all(value > 0 for value in seen.values()), seen


def test_the_branch_fits_a_hyper_connection():
    layer, x = trained().float(), torch.randn(2, 5, 16)
    streams = HyperConnection(16, n_streams=2)(expand(x, 2), layer.branch)
    torch.testing.assert_close(reduce(streams), layer(x), atol=1e-5, rtol=1e-5)


def test_the_operation_works_at_a_fraction_of_the_width():
    assert sum(p.numel() for p in Bottleneck(64, ratio=8).parameters()) == 2 * 64 + (64 * 8 + 8) + (8 * 64 + 64)


@pytest.mark.parametrize("ratio", [0, 3])
def test_an_indivisible_width_raises(ratio):
    with pytest.raises(ValueError, match=f"ratio={ratio}"):
        Bottleneck(16, ratio=ratio)
