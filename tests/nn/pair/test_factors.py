"""Factors against the tensor that they stand for, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from alphastomics.nn.pair import PairFactors, adaptive_rank
from alphastomics.nn.pair.factors import divide_by_gram
from dense_pairs import DensePairs

masked = pytest.mark.parametrize("padded", [False, True])


def dense(factors: PairFactors) -> np.ndarray:
    return np.einsum("bcir,bcjr->bijc", factors.left, factors.right)


def real_pairs(p: np.ndarray, mask: torch.Tensor | None, context: int) -> np.ndarray:
    cells = np.arange(p.shape[1]) if mask is None else np.flatnonzero(mask[context])
    return p[context][np.ix_(cells, cells)]


def test_dense_is_the_sum_over_ranks(make_factors):
    factors = make_factors()
    np.testing.assert_allclose(factors.dense(), dense(factors), atol=1e-14)


def test_padded_cells_are_zero(make_factors, mask):
    p = make_factors(mask=mask).dense()
    assert not p[1, ~mask[1]].any()
    assert not p[1][:, ~mask[1]].any()
    assert bool(p[0].all())


def test_other_factors_of_the_same_features_change_nothing(make_factors):
    factors = make_factors()
    m = torch.randn(2, 8, 3, 3, dtype=torch.float64)
    other = PairFactors(factors.left @ m, factors.right @ torch.linalg.inv(m).mT)
    torch.testing.assert_close(other.dense(), factors.dense())
    torch.testing.assert_close(other.marginals(), factors.marginals())
    torch.testing.assert_close(other.rms_norm().dense(), factors.rms_norm().dense())


@masked
def test_rms_norm_is_exact(padded, make_factors, mask):
    mask = mask if padded else None
    factors = make_factors(mask=mask)
    p, normed = dense(factors), factors.rms_norm()
    scale = [((real_pairs(p, mask, context) ** 2).mean((0, 1)) + 1e-6) ** 0.5 for context in range(2)]
    np.testing.assert_allclose(normed.dense(), p / np.stack(scale)[:, None, None], atol=1e-13)
    assert torch.allclose(normed.left / factors.left, normed.right / factors.right, equal_nan=True)


@masked
def test_marginals_are_diagonal_and_means(padded, make_factors, mask):
    mask = mask if padded else None
    factors = make_factors(mask=mask)
    p, actual = dense(factors), factors.marginals().numpy()
    assert actual.shape == (2, 11, 24)
    for context in range(2):
        cells = np.arange(11) if mask is None else np.flatnonzero(mask[context])
        block = real_pairs(p, mask, context)
        expected = [np.einsum("iic->ic", block), block.mean(1), block.mean(0)]
        np.testing.assert_allclose(actual[context, cells], np.concatenate(expected, axis=1), atol=1e-14)


def test_sums_concatenate_ranks(make_factors, mask):
    one, other = make_factors(mask=mask), make_factors(rank=2, mask=mask)
    both = one.add(other)
    assert both.rank == 5
    torch.testing.assert_close(both.dense(), one.dense() + other.dense())


def test_gates_rolls_and_transposes_match_the_tensor(make_factors, mask):
    factors = make_factors(mask=mask)
    row, column = torch.rand(2, 2, 11, 8, dtype=torch.float64)
    p = DensePairs.masked(factors.dense(), mask)
    for operation in (
        lambda x: x.gated(row, column),
        lambda x: x.roll_channels(1),
        lambda x: x.transposed(),
        lambda x: x.rms_norm(),
    ):
        torch.testing.assert_close(operation(factors).dense(), operation(p).values)
    torch.testing.assert_close(factors.marginals(), p.marginals())
    expected = np.einsum("bic,bjc,bijc->bijc", row, column, dense(factors))
    np.testing.assert_allclose(factors.gated(row, column).dense(), expected, atol=1e-13)
    np.testing.assert_allclose(factors.roll_channels(1).dense()[..., 3], dense(factors)[..., 2], atol=1e-13)
    np.testing.assert_allclose(factors.transposed().dense(), dense(factors).swapaxes(1, 2), atol=1e-13)


def test_dense_features_of_padded_cells_are_zero(mask):
    p = DensePairs.masked(torch.ones(2, 11, 11, 3), mask).values
    np.testing.assert_array_equal(p[1, ..., 0], np.outer(mask[1], mask[1]))


def test_norm_does_not_lose_precision_to_autocast(make_factors):
    factors = PairFactors(*(x.float() for x in make_factors(n=300)[:2]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        normed, marginals = factors.rms_norm(), factors.marginals()
    torch.testing.assert_close(normed.left, factors.rms_norm().left)
    torch.testing.assert_close(marginals, factors.marginals())


def test_norm_of_zeros_is_zero_and_has_a_gradient():
    left = torch.zeros(1, 2, 4, 3, requires_grad=True)
    normed = PairFactors(left, torch.zeros(1, 2, 4, 3)).rms_norm()
    normed.left.sum().backward()
    assert not normed.dense().any()
    assert bool(left.grad.isfinite().all())


def test_division_by_a_gram_matrix_is_a_least_squares_fit():
    o, basis = torch.randn(20, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    expected = torch.linalg.lstsq(basis, o.mT).solution.mT
    torch.testing.assert_close(divide_by_gram(o @ basis, basis), expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_division_by_a_basis_of_zeros_is_finite(dtype):
    basis = torch.zeros(5, 3, dtype=dtype, requires_grad=True)
    result = divide_by_gram(torch.ones(2, 5, dtype=dtype) @ basis, basis)
    result.sum().backward()
    assert not result.any()
    assert bool(basis.grad.isfinite().all())


@given(n=st.integers(1, 10**6), c=st.integers(1, 128), budget=st.integers(0, 2**34), lowest=st.integers(1, 8))
def test_adaptive_rank_is_the_largest_that_fits(n, c, budget, lowest):
    rank = adaptive_rank(n, c, budget_bytes=budget, lowest=lowest, highest=32)
    assert lowest <= rank <= 32
    assert rank == lowest or 2 * n * c * rank * 4 <= budget
    assert rank == 32 or 2 * n * c * (rank + 1) * 4 > budget


def test_a_minimum_rank_above_the_maximum_raises():
    with pytest.raises(ValueError, match="lowest=9"):
        adaptive_rank(10, 10, budget_bytes=1, lowest=9, highest=8)
