"""Grouped networks against one network after another in float64, in both layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.special import erf

from alphastomics.nn import experts as grouped
from alphastomics.nn.experts import grouped_networks, padded_counts

D, H, D_OUT = 3, 5, 4
UNEVEN, EVEN = [2, 0, 5, 1], [2, 2, 2, 2]
CPU = torch.device("cpu")


def tensors(counts: list[int], *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Rows, and weights and biases of both layers."""
    generator, n = torch.Generator().manual_seed(seed), len(counts)
    shapes = [(sum(counts), D), (n, D, H), (n, H), (n, H, D_OUT), (n, D_OUT)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def one_by_one(counts: list[int], rows, weight_1, bias_1, weight_2, bias_2) -> np.ndarray:
    """The definition, row by row."""
    group = np.repeat(np.arange(len(counts)), counts)
    before = np.einsum("rd,rdh->rh", rows, weight_1[group]) + bias_1[group]
    after = before * (1 + erf(before / np.sqrt(2))) / 2
    return np.einsum("rh,rho->ro", after, weight_2[group]) + bias_2[group]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5))
def test_every_row_meets_the_network_of_its_group(counts):
    values = tensors(counts)
    expected = one_by_one(counts, *(value.detach().numpy() for value in values))
    np.testing.assert_allclose(grouped_networks(*values, counts).detach(), expected, atol=1e-12)


@pytest.mark.parametrize("counts", [UNEVEN, EVEN])
def test_gradients(counts):
    assert torch.autograd.gradcheck(lambda *values: grouped_networks(*values, counts), tensors(counts))


def test_an_idle_group_gets_zeros():
    values = tensors(UNEVEN)
    grouped_networks(*values, UNEVEN).sum().backward()
    for value in values[1:]:
        assert value.grad is not None
        assert not bool(value.grad[1].any())
        assert bool(value.grad[[0, 2, 3]].any())


@pytest.mark.parametrize("counts", [UNEVEN, EVEN])
def test_autocast(counts):
    values = tensors(counts, dtype=torch.float32)
    exact = grouped_networks(*values, counts)
    expected = torch.autograd.grad(exact.sum(), values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = grouped_networks(*values, counts)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, atol=0.1, rtol=0.05)
    for actual, gradient in zip(torch.autograd.grad(y.float().sum(), values), expected, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, gradient, atol=0.1, rtol=0.05)


def test_the_same_again_is_equal_bit_by_bit():
    values = tensors(UNEVEN)
    first, second = (torch.autograd.grad(grouped_networks(*values, UNEVEN).square().sum(), values) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_groups_are_made_even_where_that_is_cheap(monkeypatch):
    monkeypatch.setattr(grouped, "CPU_LAUNCH_COST", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    added = 4 * 5 - sum(UNEVEN)  # 12 rows
    assert padded_counts(UNEVEN, 4 * 3 * 10 // added, CPU) == [5, 5, 5, 5]
    assert padded_counts(UNEVEN, 4 * 3 * 10 // added + 1, CPU) == UNEVEN
    assert padded_counts(UNEVEN, 4 * grouped.GPU_LAUNCH_COST // added + 1, torch.device("cuda")) == UNEVEN
    assert padded_counts(UNEVEN, 4 * grouped.GPU_LAUNCH_COST // added, torch.device("cuda")) == [5, 5, 5, 5]
