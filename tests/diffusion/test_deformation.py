"""The random deformation against its formula, and that it is gentle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from alphastomics.diffusion.deformation import deform, draw_deformation


def slice_positions(n: int = 60, n_dims: int = 2) -> torch.Tensor:
    return torch.randn(n, n_dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def deformed(x: torch.Tensor, strength: float, seed: int = 0) -> torch.Tensor:
    return deform(x, draw_deformation(x.shape[1], strength, np.random.default_rng(seed)))


@pytest.mark.parametrize("n_dims", [2, 3])
def test_no_strength_is_no_deformation(n_dims):
    x = slice_positions(n_dims=n_dims)
    assert torch.equal(deformed(x, 0.0), x)


@given(seed=st.integers(0, 1000), n_dims=st.sampled_from([2, 3]))
def test_displacements_are_proportional_to_the_strength(seed, n_dims):
    """The formula is linear in s, all other draws being the same."""
    x = slice_positions(n_dims=n_dims)
    small, large = (deformed(x, s, seed) - x for s in (0.1, 0.3))
    torch.testing.assert_close(3 * small, large)


def test_cells_are_moved_one_by_one_by_the_generator_alone():
    x = slice_positions()
    torch.manual_seed(3)
    whole = deformed(x, 0.2)
    torch.testing.assert_close(deformed(x[::3], 0.2), whole[::3])
    assert not torch.allclose(deformed(x, 0.2, seed=1), whole, atol=1e-2)


def test_its_size_matches_the_formula():
    """Over many draws: variance s^2 |x|^2 of the linear part, and of the waves 6 c^2 s^2 E[1/|w|^2] / 2 per axis."""
    x, s = torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64), 0.2
    moves = torch.stack([deformed(x, s, seed) - x for seed in range(3000)]).numpy()
    omega = np.random.default_rng(0).normal(size=(200_000, 2)) / 0.8
    waves = 6 * 0.6**2 * s**2 * np.mean(1 / np.maximum(np.linalg.norm(omega, axis=1), 0.5) ** 2) / 2
    np.testing.assert_allclose(moves[:, 0].var(0), waves, rtol=0.15)
    np.testing.assert_allclose(moves[:, 1].var(0), waves + 4 * s**2, rtol=0.15)


def test_neighbors_stay_neighbors():
    """A smooth map: over a hundredth of a unit it is its derivative, and at the usual strength it hardly ever folds."""
    x = slice_positions(200)
    step, folded = 1e-4, 0
    for seed in range(50):
        columns = [
            (deformed(x + step * axis, 0.2, seed) - deformed(x - step * axis, 0.2, seed)) / (2 * step)
            for axis in torch.eye(2, dtype=x.dtype)
        ]
        folded += int((torch.linalg.det(torch.stack(columns, dim=1)) <= 0).sum())
    assert folded < 0.01 * 50 * 200


def test_precision_is_kept_also_under_autocast():
    x = slice_positions().float()
    expected = deformed(x.double(), 0.2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = deformed(x, 0.2)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=0)
