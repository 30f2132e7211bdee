"""Relative positions are functions of a difference, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from alphastomics.nn.pair import RelativePosition


def make(n_frequencies: int = 16) -> RelativePosition:
    torch.manual_seed(0)
    return RelativePosition(3, n_frequencies).double()


def test_features_match_the_formula(mask):
    module = make(n_frequencies=5)
    index = 40 * torch.rand(2, 11, dtype=torch.float64)
    omega = module.frequencies.numpy()
    np.testing.assert_allclose(omega, 2 * np.pi / np.geomspace(1024, 2, 5), rtol=1e-6)
    phase = (index[:, :, None] - index[:, None]).numpy()[..., None] * omega
    a, b = module.even.detach().numpy(), module.odd.detach().numpy()
    expected = np.cos(phase) @ a.T + np.sin(phase) @ b.T
    expected = expected * (mask[:, :, None] & mask[:, None]).numpy()[..., None]
    factors = module(index, mask)
    assert factors.rank == module.rank == 10
    np.testing.assert_allclose(factors.dense().detach(), expected, atol=1e-12)


@given(shift=st.floats(-1e4, 1e4))
def test_a_shift_of_all_indices_changes_nothing(shift):
    """Bar: 1e-10."""
    module, index = make(), torch.rand(1, 20, dtype=torch.float64) * 300
    p = module(index).dense()
    assert float((module(index + shift).dense() - p).detach().abs().max()) <= 1e-10
    assert float(p.detach().std()) > 0.1


def test_cells_that_are_equally_far_apart_have_the_same_features():
    p = make()(torch.arange(50)[None]).dense().detach().numpy()[0]
    for gap in (-7, 0, 3):
        along = np.diagonal(p, gap)
        np.testing.assert_allclose(along, np.repeat(along[:, :1], along.shape[1], axis=1), atol=1e-10)


def test_even_and_odd_coefficients_make_even_and_odd_functions():
    module, index = make(), torch.arange(9.0, dtype=torch.float64)[None]
    with torch.no_grad():
        module.odd.zero_()
        torch.testing.assert_close(module(index).dense(), module(index).transposed().dense())
        module.odd.normal_()
        module.even.zero_()
        torch.testing.assert_close(module(index).dense(), -module(index).transposed().dense())


def test_padded_indices_have_no_effect(mask):
    module, index = make(), torch.randperm(22).view(2, 11)
    changed = index.masked_fill(~mask, -(10**6))
    torch.testing.assert_close(module(changed, mask).dense(), module(index, mask).dense())
    real = index.double().masked_fill(~mask, float("nan"))
    torch.testing.assert_close(module(real, mask).dense(), module(index, mask).dense())


def test_large_integers_keep_single_precision():
    """Residue 100,000 of a chain is as good as the first."""
    module, index = RelativePosition(3, 16), torch.arange(20)[None]
    torch.testing.assert_close(module(index + 10**6).dense(), module(index).dense(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("n_frequencies", "least"), [(8, 0.97), (16, 0.998)])
def test_clipped_differences_are_within_reach(n_frequencies, least):
    module, index = make(n_frequencies=n_frequencies), torch.arange(300)[None]
    target = (index[0, :, None] - index[0]).clamp(-32, 32).double().flatten()
    basis = []
    with torch.no_grad():
        for coefficients in (module.even, module.odd):
            for m in range(n_frequencies):
                module.even.zero_()
                module.odd.zero_()
                coefficients[0, m] = 1
                basis.append(module(index).dense()[0, :, :, 0].flatten())
    x = torch.stack(basis, dim=1)
    rest = target - x @ torch.linalg.lstsq(x, target[:, None]).solution[:, 0]
    assert 1 - float(rest.square().sum() / (target - target.mean()).square().sum()) > least
