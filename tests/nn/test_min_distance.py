"""The minimum-distance network: its neighbors, its symmetries, and what it can learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.spatial.distance import cdist

from alphastomics.nn import MinDistanceNetwork, nearest_neighbors
from rotations import random_rotation


def network() -> MinDistanceNetwork:
    torch.manual_seed(0)
    return MinDistanceNetwork()


def cells(seed: int = 0, n: int = 40, n_dims: int = 2) -> torch.Tensor:
    return 3 * torch.randn(n, n_dims, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 1000), k=st.integers(1, 8), n_dims=st.sampled_from([2, 3]))
def test_neighbors_are_the_nearest_others(seed, k, n_dims):
    y = cells(seed, 12, n_dims)
    distance = cdist(y.double(), y.double())
    np.fill_diagonal(distance, np.inf)
    found = nearest_neighbors(y, k).numpy()
    np.testing.assert_array_equal(found, np.argsort(distance, axis=1)[:, :k])


def test_coincident_cells_are_neighbors_of_each_other_and_never_of_themselves():
    y = torch.cat([torch.zeros(6, 2), torch.ones(2, 2)])
    found = nearest_neighbors(y, 3)
    assert found.shape == (8, 3)
    assert not bool((found == torch.arange(8)[:, None]).any())
    assert bool((found[:6] < 6).all())
    assert all(len(set(row)) == 3 for row in found.tolist())


@pytest.mark.parametrize(("n", "k"), [(1, 0), (2, 1), (5, 4)])
def test_few_cells_have_all_others_as_neighbors(n, k):
    y = cells(n=n)
    assert nearest_neighbors(y, 12).shape == (n, k)
    if k:
        assert network()(y, torch.tensor(1.0), nearest_neighbors(y, 12)).shape == y.shape


@pytest.mark.parametrize("n_dims", [2, 3])
def test_the_output_turns_and_moves_with_the_input(n_dims):
    module, y, r = network().double(), cells(n_dims=n_dims).double(), torch.tensor(0.7, dtype=torch.float64)
    turn = random_rotation(n_dims, torch.Generator().manual_seed(4)).double()
    expected = module(y, r, nearest_neighbors(y, 12)) @ turn + 5
    moved = y @ turn + 5
    torch.testing.assert_close(module(moved, r, nearest_neighbors(moved, 12)), expected, atol=1e-5, rtol=1e-5)


def test_the_order_of_cells_is_immaterial():
    module, y, r, order = network(), cells(), torch.tensor(0.7), torch.randperm(40)
    expected = module(y, r, nearest_neighbors(y, 12))[order]
    torch.testing.assert_close(module(y[order], r, nearest_neighbors(y[order], 12)), expected, atol=1e-5, rtol=1e-5)


def test_without_noise_nothing_moves():
    module, y = network(), cells()
    neighbors = nearest_neighbors(y, 12)
    moved = [(module(y, torch.tensor(r), neighbors) - y).norm().item() for r in (1e-6, 1e-3, 1.0)]
    assert moved[0] < 1e-3 * moved[2]
    assert moved[0] < moved[1] < moved[2]


def test_autocast_does_not_round_positions():
    module, y, r = network(), cells() + 50, torch.tensor(0.7)
    neighbors = nearest_neighbors(y, 12)
    expected = module(y, r, neighbors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(module(y, r, neighbors), expected)


def test_values_and_gradients_are_finite_where_cells_coincide():
    module = network()
    y = torch.cat([torch.zeros(4, 2), cells(n=10)]).requires_grad_()
    module(y, torch.tensor(0.5), nearest_neighbors(y, 12)).square().sum().backward()
    assert bool(y.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)


def test_minimum_spacing_is_learned():
    """On a jittered lattice the neighbors determine where a cell was before it was moved."""
    module, generator = network(), torch.Generator().manual_seed(0)
    grid = torch.stack(torch.meshgrid(torch.arange(9.0), torch.arange(9.0), indexing="ij"), -1).reshape(-1, 2)
    inner = ((grid > 1.5) & (grid < 6.5)).all(1)
    optimizer, r = torch.optim.Adam(module.parameters(), lr=1e-2), torch.tensor(0.3)
    errors = []
    for _ in range(120):
        noise = 0.3 * torch.randn(grid.shape, generator=generator)
        y = grid + noise
        loss = ((module(y, r, nearest_neighbors(y, 12)) - grid)[inner] ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(float(loss.detach()) / 0.09)
    assert np.mean(errors[-30:]) < 0.85
