"""Crowding: against all distances, and what it must not depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.spatial.distance import cdist

from alphastomics.data import local_density
from alphastomics.data._local_density import BOUND, RANKS


def dense(position: np.ndarray, cells: np.ndarray, among: np.ndarray) -> np.ndarray:
    distance = cdist(position[cells], position)
    distance[:, ~among] = np.inf
    distance[np.arange(len(cells)), cells] = np.inf
    nearest = np.sort(distance, axis=1)[:, np.minimum(RANKS, among.sum() - 1) - 1]
    return np.clip(np.log(nearest / np.median(nearest, axis=0)), -BOUND, BOUND)


@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("n_cells", [3, 40, 300])
def test_local_density_matches_all_distances(n_dims, n_cells):
    rng = np.random.default_rng(n_cells)
    position = rng.standard_normal((n_cells, n_dims)) ** 3
    every, all_of_them = np.arange(n_cells), np.ones(n_cells, dtype=bool)
    np.testing.assert_allclose(local_density(position), dense(position, every, all_of_them), atol=1e-5)
    cells, among = rng.permutation(n_cells)[: n_cells // 2 + 1], rng.random(n_cells) < 0.7
    among[:3] = True
    np.testing.assert_allclose(local_density(position, cells, among=among), dense(position, cells, among), atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3))
def test_unit_frame_and_order_do_not_matter(seed, scale):
    rng = np.random.default_rng(seed)
    position = rng.standard_normal((80, 2))
    rotation, _ = np.linalg.qr(rng.standard_normal((2, 2)))
    expected = local_density(position)
    np.testing.assert_allclose(local_density(scale * position @ rotation + 5), expected, atol=1e-4)
    order = rng.permutation(80)
    np.testing.assert_array_equal(local_density(position[order]), expected[order])


def test_local_density_is_high_in_clusters_and_low_for_single_cells():
    rng = np.random.default_rng(0)
    position = np.concatenate([rng.uniform(0, 10, (400, 2)), rng.uniform(4, 5, (100, 2)), [[30.0, 30.0]]])
    found = local_density(position)
    assert (found[400:500].mean(0) < found[:400].mean(0)).all()
    assert (found[-1] == found.max(0)).all()


@pytest.mark.parametrize("n_cells", [0, 1])
def test_without_neighbors_it_is_0(n_cells):
    assert local_density(np.zeros((n_cells, 2))).tolist() == [[0.0] * len(RANKS)] * n_cells


def test_cells_that_lie_on_one_another_are_finite():
    found = local_density(np.repeat(np.random.default_rng(0).standard_normal((30, 2)), [1] * 25 + [4] * 5, axis=0))
    assert np.isfinite(found).all()
    assert found.min() == -BOUND
