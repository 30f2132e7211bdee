"""Removal of overlaps: distances of neighbors in the result, what does not move, and what the result must not depend on."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.spatial import KDTree

from alphastomics.sampling import _overlap
from alphastomics.sampling._overlap import JITTER, LEVELS, MAX_VOLUME, NearestDistances, remove_overlaps
from alphastomics.sampling._perturbation import Perturbation
from alphastomics.sampling._sampler import FittedStatistics


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def nearest(x: np.ndarray) -> np.ndarray:
    return KDTree(x).query(x, 2)[0][:, 1]


def square(n: int, n_dims: int = 2, seed: int = 0) -> np.ndarray:
    return rng(seed).uniform(-1, 1, (n, n_dims))


def fit(x: np.ndarray) -> NearestDistances:
    return NearestDistances.fit([x.astype(np.float32)])


def constant(distance: float, n_cells: int = 10**6) -> NearestDistances:
    """A reference in which all cells are at one distance."""
    quantiles, number, radius = (
        np.asarray(x, dtype=np.float32) for x in (np.full(len(LEVELS), distance), [n_cells], [1])
    )
    return NearestDistances(quantiles=quantiles, n_cells=number, radius=radius)


# -- the reference -----------------------------------------------------------------------------------------------------


def test_quantiles_are_those_of_the_distances_of_all_slices():
    slices = [square(n, seed=n).astype(np.float32) for n in (40, 90, 1)]
    fitted = NearestDistances.fit(slices)
    distances = []
    for x in slices[:2]:
        far = np.linalg.norm(x[:, None].astype(float) - x, axis=-1)
        np.fill_diagonal(far, np.inf)
        distances.append(far.min(1))
    np.testing.assert_allclose(fitted.quantiles, np.quantile(np.concatenate(distances), LEVELS), rtol=1e-5)
    assert fitted.quantiles.dtype == fitted.n_cells.dtype == np.float32
    assert fitted.n_cells.tolist() == [90]
    assert fitted.radius[0] == pytest.approx(np.mean([np.sqrt(x.var(0).sum()) for x in slices]), rel=1e-5)


@pytest.mark.parametrize(
    "changed", [{"n_cells": [0]}, {"n_cells": [-3]}, {"radius": [-1]}, {"quantiles": [-1]}, {"radius": [1, 1]}]
)
def test_damaged_distances_are_invalid(changed):
    fitted = fit(square(30))
    assert fitted.is_valid(5, 2)
    (name, values), array = *changed.items(), np.array(*changed.values(), dtype=np.float32)
    if name == "quantiles":
        array = np.where(np.arange(len(LEVELS)) == 3, array, fitted.quantiles)
    assert not replace(fitted, **{name: array}).is_valid(5, 2), values


def test_slices_of_one_cell_have_no_distances():
    fitted = NearestDistances.fit([np.zeros((1, 2), dtype=np.float32)])
    assert not fitted.quantiles.any()
    x = square(30)
    np.testing.assert_array_equal(remove_overlaps(x, fitted, rng()), x)


@given(n=st.integers(1, 500), n_cells=st.integers(2, 200), n_dims=st.sampled_from([2, 3]))
def test_distances_of_cells_are_quantiles_that_shrink_for_cells_of_several_specimens(n, n_cells, n_dims):
    fitted = NearestDistances.fit([square(n_cells, n_dims).astype(np.float32)])
    distances = fitted.of_cells(n, n_dims)
    assert distances.shape == (n,)
    assert (np.diff(distances) >= 0).all()
    volume = min(1.0, MAX_VOLUME * n_cells / n)
    expected = np.interp((np.arange(n) + 0.5) / n, LEVELS, fitted.quantiles) * volume ** (1 / n_dims)
    np.testing.assert_allclose(distances, expected)


@pytest.mark.parametrize(("n_dims", "times"), [(2, 4), (3, 8)])
def test_cells_of_several_specimens_are_placed_in_the_volume_of_one(n_dims, times):
    fitted = fit(square(100, n_dims))
    n = int(times * MAX_VOLUME * 100)
    np.testing.assert_allclose(fitted.of_cells(n, n_dims).max(), fitted.quantiles[-1] / 2, rtol=0.02)
    moved = remove_overlaps(square(n, n_dims, seed=1), fitted, rng())
    assert (np.abs(moved) > 1.1).any(axis=1).mean() < 0.05


def test_statistics_survive_their_files():
    fitted = FittedStatistics(nearest=fit(square(50)), perturbation=Perturbation(share=0.3, offset=0.1))
    values = json.loads(json.dumps(fitted.to_dict()))
    restored = FittedStatistics.restore(values, fitted.to_tensors(), n_genes=7, n_dims=2)
    assert restored.perturbation == fitted.perturbation
    for name in ("quantiles", "n_cells"):
        np.testing.assert_array_equal(getattr(restored.nearest, name), getattr(fitted.nearest, name))


@pytest.mark.parametrize(("name", "size"), [("quantiles", 5), ("n_cells", 2)])
def test_distances_of_another_shape_raise(name, size):
    fitted = FittedStatistics(nearest=fit(square(50)))
    tensors = fitted.to_tensors()
    tensors[f"nearest.{name}"] = tensors[f"nearest.{name}"].new_ones(size)
    with pytest.raises(ValueError, match="nearest"):
        FittedStatistics.restore(fitted.to_dict(), tensors, n_genes=7, n_dims=2)


# -- the result --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "n_dims"), [(60, 2), (250, 2), (60, 3), (500, 3)])
@pytest.mark.parametrize("shape", ["contracted", "flattened"])
def test_a_collapsed_tissue_has_the_median_distance_of_the_reference(n, n_dims, shape):
    reference = square(n, n_dims)
    x = reference * (0.3 if shape == "contracted" else np.r_[0.2, np.ones(n_dims - 1)])
    moved = remove_overlaps(x, fit(reference), rng())
    assert np.median(nearest(x)) < 0.7 * np.median(nearest(reference))
    assert np.median(nearest(moved)) == pytest.approx(np.median(nearest(reference)), rel=0.1)
    for level in (0.05, 0.1, 0.25):
        assert np.quantile(nearest(moved), level) > 1.2 * np.quantile(nearest(x), level)


def test_cells_at_one_place_are_separated():
    reference = square(80)
    moved = remove_overlaps(np.zeros((80, 2)), fit(reference), rng())
    assert nearest(moved).min() > 0.1 * np.median(nearest(reference))
    assert np.median(nearest(moved)) == pytest.approx(np.median(nearest(reference)), rel=0.1)


def test_two_cells_are_moved_apart_along_their_line():
    x = np.array([[0.0, 0.0], [0.06, 0.08]])
    moved = remove_overlaps(x, constant(1.0), rng())
    assert 1 <= np.linalg.norm(moved[1] - moved[0]) < 1.6
    np.testing.assert_allclose(moved.mean(0), x.mean(0), atol=5 * JITTER)
    direction = (moved[1] - moved[0]) / np.linalg.norm(moved[1] - moved[0])
    np.testing.assert_allclose(direction, [0.6, 0.8], atol=0.05)


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_cells_do_not_move(n):
    x = square(n)
    np.testing.assert_array_equal(remove_overlaps(x, constant(1.0), rng()), x)


def test_a_tissue_without_overlaps_hardly_moves():
    grid = np.stack(np.meshgrid(np.arange(12.0), np.arange(12.0)), axis=-1).reshape(-1, 2)
    moved = remove_overlaps(grid, constant(0.9), rng())
    assert 0 < np.abs(moved - grid).max() < 5 * JITTER


@settings(max_examples=25)
@given(n=st.integers(2, 60), n_dims=st.sampled_from([2, 3]), n_fixed=st.integers(0, 60), seed=st.integers(0, 10**6))
def test_fixed_cells_do_not_move(n, n_dims, n_fixed, seed):
    x = 0.2 * square(n, n_dims, seed)
    fixed = rng(seed).permutation(n) < n_fixed
    before = x.copy()
    moved = remove_overlaps(x, fit(square(n, n_dims)), rng(seed), fixed)
    np.testing.assert_array_equal(moved[fixed], x[fixed])
    np.testing.assert_array_equal(x, before)
    assert np.isfinite(moved).all()
    assert (moved[~fixed] != x[~fixed]).any(axis=1).all()


def test_other_cells_make_room_for_fixed_ones():
    x = np.zeros((40, 2))
    fixed = np.arange(40) == 0
    moved = remove_overlaps(x, constant(0.1), rng(), fixed)
    assert nearest(moved)[0] > 0.03


def test_the_given_positions_and_the_seed_decide():
    x, fitted = 0.3 * square(60), fit(square(60))
    first, again, other = (remove_overlaps(x, fitted, rng(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.fixture
def without_jitter(monkeypatch):
    monkeypatch.setattr(_overlap, "JITTER", 0.0)


def test_permuted_cells_of_one_radius_give_the_permuted_result(without_jitter):
    x, order = 0.3 * square(80), rng(1).permutation(80)
    expected = remove_overlaps(x, constant(0.1), rng())[order]
    np.testing.assert_allclose(remove_overlaps(x[order], constant(0.1), rng()), expected, atol=1e-9)


@pytest.mark.parametrize("n_dims", [2, 3])
def test_a_rotated_tissue_gives_the_rotated_result(without_jitter, n_dims):
    x, fitted = 0.3 * square(80, n_dims), fit(square(80, n_dims))
    rotation = np.linalg.qr(rng(1).standard_normal((n_dims, n_dims)))[0]
    expected = remove_overlaps(x, fitted, rng()) @ rotation + 3
    np.testing.assert_allclose(remove_overlaps(x @ rotation + 3, fitted, rng()), expected, atol=1e-9)


def test_units_do_not_matter():
    x, reference = 0.3 * square(80), square(80)
    expected = 1024 * remove_overlaps(x, fit(reference), rng())
    np.testing.assert_allclose(remove_overlaps(1024 * x, fit(1024 * reference), rng()), expected, rtol=1e-9)
