"""Axial attention on factors against its equations, and that of all pairs, which is the oracle of the specification."""

from __future__ import annotations

import pytest
import torch

from alphastomics.nn.pair import AxialAttention, PairFactors
from alphastomics.nn.pair.axial import key_mask
from dense_pairs import DenseAxialAttention


def make(kind: type[AxialAttention | DenseAxialAttention] = AxialAttention) -> AxialAttention | DenseAxialAttention:
    torch.manual_seed(0)
    module = kind(8, 2).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    return module


def linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.mT + layer.bias


def shared_matrix(axis: torch.nn.Module, p: torch.Tensor) -> torch.Tensor:
    """I + Gamma B for each channel, (C, N, N), of one context p (N, N, C)."""
    p = p / (p.square().mean((0, 1)) + 1e-6).sqrt()
    summary = torch.cat([torch.einsum("iic->ic", p), p.mean(1), p.mean(0)], dim=-1)
    q, k = linear(axis.query_key, summary).chunk(2, dim=-1)
    matrices = [(q[:, 4 * h : 4 * h + 4] @ k[:, 4 * h : 4 * h + 4].mT / 2).softmax(-1) for h in range(2)]
    return torch.eye(len(p)) + linear(axis.gain, summary).mT[..., None] * torch.stack(matrices).repeat_interleave(4, 0)


def by_factor(module: AxialAttention, p: torch.Tensor) -> torch.Tensor:
    p = torch.einsum("cjk,ikc->ijc", shared_matrix(module.row, p), p)
    return torch.einsum("cik,kjc->ijc", shared_matrix(module.column, p), p)


def along_rows(axis: torch.nn.Module, p: torch.Tensor) -> torch.Tensor:
    x = (p - p.mean(-1, keepdim=True)) / (p.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    x = x * axis.norm.weight + axis.norm.bias
    q, k, v = linear(axis.qkv, x).chunk(3, dim=-1)
    heads = []
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        weight = (torch.einsum("ijd,ikd->ijk", q[..., part], k[..., part]) / 2).softmax(-1)
        heads.append(torch.einsum("ijk,ikd->ijd", weight, v[..., part]))
    return p + linear(axis.out, torch.cat(heads, -1)) * linear(axis.gate, x).sigmoid()


def by_pair(module: DenseAxialAttention, p: torch.Tensor) -> torch.Tensor:
    p = along_rows(module.row, p)
    return along_rows(module.column, p.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("rank", [1, 3, 9])
def test_factors_attend_as_the_tensor_does(rank, make_factors, mask, difference):
    """Bar: 1e-10, value and gradient."""
    module = make()
    left, right = (x.requires_grad_() for x in make_factors(rank=rank)[:2])
    factors = PairFactors.masked(left, right, mask)
    inputs = (left, right, *module.parameters())
    after, p = module(factors), factors.dense()
    assert after.rank == rank
    for context, cells in enumerate(mask):
        real = cells.nonzero()[:, 0]
        expected = by_factor(module, p[context][real][:, real])
        actual = after.dense()[context][real][:, real]
        assert difference(actual, expected) <= 1e-10
        weight = torch.randn_like(expected)
        grads = [
            torch.cat([g.flatten() for g in torch.autograd.grad((x * weight).sum(), inputs, retain_graph=True)])
            for x in (actual, expected)
        ]
        assert difference(*grads) <= 1e-10


def test_tensors_attend_along_rows_and_columns(make_factors, mask, difference):
    """Bar: 1e-10."""
    module, p = make(DenseAxialAttention), make_factors().dense()
    after = module(p, mask)
    assert not after[1, ~mask[1]].any()
    assert not after[1][:, ~mask[1]].any()
    for context, cells in enumerate(mask):
        real = cells.nonzero()[:, 0]
        assert difference(after[context][real][:, real], by_pair(module, p[context][real][:, real])) <= 1e-10
    assert difference(module(p)[1], by_pair(module, p[1])) <= 1e-10


def test_attention_does_not_depend_on_the_choice_of_factors(make_factors):
    module, factors = make(), make_factors()
    m = torch.randn(2, 8, 3, 3, dtype=torch.float64)
    other = PairFactors(factors.left @ m, factors.right @ torch.linalg.inv(m).mT)
    torch.testing.assert_close(module(other).dense(), module(factors).dense())


def test_at_first_nothing_changes(make_factors):
    factors = make_factors()
    assert torch.equal(AxialAttention(8, 2).double()(factors).dense(), factors.dense())


def test_attention_over_all_pairs_learns_with_padding(make_factors):
    module, p = make(DenseAxialAttention), make_factors().dense().requires_grad_()
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1] = False
    after = module(p, mask)
    assert not after[1].any()
    after.square().sum().backward()
    assert bool(p.grad.isfinite().all())
    for name, parameter in module.named_parameters():
        assert bool(parameter.grad.any()), name


def test_every_context_has_keys(mask):
    """Whatever a kernel makes of queries that may look at nothing."""
    mask[0] = False
    assert bool(key_mask(mask)[0].all())
    torch.testing.assert_close(key_mask(mask)[1, 0, 0], mask[1])


def test_no_score_is_stored(make_factors):
    """Widths of queries and values must be equal, or the CPU stores all scores."""
    n, saved = 37, []
    factors = PairFactors(*(x.float().requires_grad_() for x in make_factors(n=n)[:2]))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        make().float()(factors)
    assert saved
    assert max(shape.count(n) for shape in saved) == 1


def test_heads_that_do_not_divide_the_channels_raise():
    with pytest.raises(ValueError, match="n_heads"):
        AxialAttention(8, 3)
