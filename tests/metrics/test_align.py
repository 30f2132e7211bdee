"""Rigid alignment and the scores that rest on it, against scipy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.spatial import procrustes
from scipy.spatial.transform import Rotation

from alphastomics.metrics import aligned_rmsd, procrustes_disparity, rigid_align, rigid_rmsd


def random_orthogonal(rng: np.random.Generator, n_dims: int, *, mirrored: bool) -> np.ndarray:
    q, r = np.linalg.qr(rng.normal(size=(n_dims, n_dims)))
    q = q * np.sign(np.diag(r))
    if (np.linalg.det(q) < 0) != mirrored:
        q[:, 0] *= -1
    return q


@pytest.mark.parametrize("weighted", [False, True])
def test_rotation_equals_scipy_align_vectors(weighted):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(40, 3))
    w = rng.uniform(0.1, 2, size=40) if weighted else np.ones(40)
    center_x, center_y = np.average(x, axis=0, weights=w), np.average(y, axis=0, weights=w)
    expected, _ = Rotation.align_vectors(y - center_y, x - center_x, weights=w)
    aligned, transform = rigid_align(x, y, weights=w if weighted else None, reflection=False)
    np.testing.assert_allclose(transform.rotation, expected.as_matrix(), atol=1e-10)
    np.testing.assert_allclose(aligned, expected.apply(x - center_x) + center_y, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n_dims=st.sampled_from([2, 3]),
    mirrored=st.booleans(),
    factor=st.floats(0.1, 10),
    shift=st.floats(-1e3, 1e3),
)
def test_a_similarity_is_recovered(seed, n_dims, mirrored, factor, shift):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, n_dims))
    rotation = random_orthogonal(rng, n_dims, mirrored=mirrored)
    y = factor * x @ rotation.T + shift
    aligned, transform = rigid_align(x, y, scale=True)
    np.testing.assert_allclose(aligned, y, atol=1e-8)
    np.testing.assert_allclose(transform.apply(x), aligned, atol=1e-8)
    np.testing.assert_allclose(transform.rotation, rotation, atol=1e-8)
    assert transform.scale == pytest.approx(factor)
    proper, proper_transform = rigid_align(x, y, scale=True, reflection=False)
    assert np.linalg.det(proper_transform.rotation) == pytest.approx(1)
    assert np.allclose(proper, y, atol=1e-6) != mirrored


def test_without_scale_the_size_stays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 2))
    aligned, transform = rigid_align(x, 5 * x)
    assert transform.scale == 1
    np.testing.assert_allclose(aligned, x - x.mean(axis=0) + 5 * x.mean(axis=0), atol=1e-12)


def test_weighted_fit_is_the_optimum():
    """No rotation by a small angle, no other scale and no shift does better on the weighted squared error."""
    rng = np.random.default_rng(3)
    x, y, w = rng.normal(size=(15, 2)), rng.normal(size=(15, 2)), rng.uniform(size=15)

    def cost(z: np.ndarray) -> float:
        return float(w @ np.square(z - y).sum(axis=1))

    aligned, transform = rigid_align(x, y, weights=w, scale=True)
    best = cost(aligned)
    for angle in (-0.01, 0.01):
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        moved = transform.scale * x @ (turn @ transform.rotation).T
        assert cost(moved - np.average(moved - y, axis=0, weights=w)) > best
    for factor in (0.99, 1.01):
        moved = factor * (aligned - np.average(aligned, axis=0, weights=w))
        assert cost(moved - np.average(moved - y, axis=0, weights=w)) > best
    assert cost(aligned + 0.01) > best


def test_a_cell_of_weight_zero_is_moved_but_not_fitted():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, 2))
    y = x + 3
    y[0] = 100
    aligned, _ = rigid_align(x, y, weights=np.r_[0, np.ones(9)])
    np.testing.assert_allclose(aligned, x + 3, atol=1e-10)


@pytest.mark.parametrize("n_dims", [2, 3])
def test_disparity_and_rmsd_equal_scipy_procrustes(n_dims):
    rng = np.random.default_rng(1)
    y = rng.normal(size=(200, n_dims)) * [3, *[1] * (n_dims - 1)] + 50
    x = -2 * y[:, ::-1] + rng.normal(size=y.shape)
    expected = procrustes(y, x)[2]
    assert 0.01 < expected < 0.9
    assert procrustes_disparity(y, x) == pytest.approx(expected, abs=1e-10)
    assert aligned_rmsd(y, x) == pytest.approx(np.sqrt(expected), abs=1e-10)


def test_rmsd_without_alignment_is_the_plain_difference():
    rng = np.random.default_rng(1)
    y, noise = rng.normal(size=(2, 50, 2))
    radius = np.sqrt(np.square(y - y.mean(axis=0)).sum(axis=1).mean())
    expected = np.sqrt(np.square(noise).sum(axis=1).mean()) / radius
    assert aligned_rmsd(y, y + noise, align=False) == pytest.approx(expected, abs=1e-12)
    assert aligned_rmsd(y, y @ [[0, 1], [-1, 0]], align=True) == pytest.approx(0, abs=1e-7)
    assert aligned_rmsd(y, y @ [[0, 1], [-1, 0]], align=False) > 1


def test_collapse_scores_one_and_a_point_has_no_score():
    y = np.random.default_rng(0).normal(size=(20, 2))
    assert aligned_rmsd(y, np.full_like(y, 7.0)) == pytest.approx(1)
    assert procrustes_disparity(y, np.zeros_like(y)) == pytest.approx(1)
    assert np.isnan(aligned_rmsd(np.zeros_like(y), y))
    assert np.isnan(aligned_rmsd(np.full_like(y, 0.1), y))  # whose mean is not exactly the point
    assert np.isnan(aligned_rmsd(y[:1], y[:1]))


def test_rigid_rmsd_equals_scipy_align_vectors():
    rng = np.random.default_rng(4)
    y = rng.normal(size=(60, 3)) * [3, 2, 1] + 20
    x = 0.7 * y[:, ::-1] + rng.normal(size=y.shape)
    _, rssd = Rotation.align_vectors(y - y.mean(axis=0), x - x.mean(axis=0))
    expected = rssd / np.linalg.norm(y - y.mean(axis=0))
    assert rigid_rmsd(y, x) == pytest.approx(expected, abs=1e-10)
    assert rigid_rmsd(y, x, reflection=True) < expected - 0.01


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n_dims=st.sampled_from([2, 3]),
    factor=st.floats(0.1, 10),
    shift=st.floats(-1e3, 1e3),
)
def test_rigid_rmsd_depends_on_the_size_and_not_on_the_frame(seed, n_dims, factor, shift):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(12, n_dims))
    rotation = random_orthogonal(rng, n_dims, mirrored=False)
    x = y @ rotation.T + shift
    assert rigid_rmsd(y, x) == pytest.approx(aligned_rmsd(y, x), abs=1e-9)
    assert rigid_rmsd(y, x) == pytest.approx(0, abs=1e-9)
    assert rigid_rmsd(y, factor * x) == pytest.approx(abs(factor - 1), abs=1e-8)
    assert aligned_rmsd(y, factor * x) == pytest.approx(0, abs=1e-8)
    noisy = y + rng.normal(size=y.shape)
    assert rigid_rmsd(y, noisy @ rotation.T + shift) == pytest.approx(rigid_rmsd(y, noisy), abs=1e-8)
    assert rigid_rmsd(y, noisy) >= aligned_rmsd(y, noisy) - 1e-12


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), n_dims=st.sampled_from([2, 3]), axis=st.integers(0, 1))
def test_a_mirror_image_is_an_error_in_three_dimensions_only(seed, n_dims, axis):
    y = np.random.default_rng(seed).normal(size=(12, n_dims))
    mirrored = y.copy()
    mirrored[:, axis] *= -1
    assert aligned_rmsd(y, mirrored) == pytest.approx(0, abs=1e-7)
    assert rigid_rmsd(y, mirrored, reflection=True) == pytest.approx(0, abs=1e-9)
    # The variance of the thinnest axis is mirrored: sum |2 y_n|² / sum |y|².
    thinnest = np.linalg.svd(y - y.mean(axis=0), compute_uv=False)
    expected = 2 * thinnest[-1] / np.linalg.norm(thinnest)
    assert rigid_rmsd(y, mirrored, reflection=False) == pytest.approx(expected, abs=1e-9)
    assert rigid_rmsd(y, mirrored) == pytest.approx(expected if n_dims == 3 else 0, abs=1e-9)
    assert expected > 0.01


def test_rigid_rmsd_of_a_collapse_a_point_and_fixed_frames():
    y = np.random.default_rng(0).normal(size=(20, 2))
    assert rigid_rmsd(y, y / 2) == pytest.approx(0.5)
    assert rigid_rmsd(y, np.full_like(y, 7.0)) == pytest.approx(1)
    assert np.isnan(rigid_rmsd(np.zeros_like(y), y))
    assert np.isnan(rigid_rmsd(y[:1], y[:1]))
    assert rigid_rmsd(y, y + 1, align=False) == aligned_rmsd(y, y + 1, align=False) > 0
    with pytest.raises(ValueError, match="shape"):
        rigid_rmsd(y, y[1:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": np.zeros((3, 2))}, "shape"),
        ({"source": np.full((4, 2), np.nan)}, "finite"),
        ({"weights": np.ones(3)}, "weights"),
        ({"weights": [1, -1, 1, 1]}, "weights.*negative"),
        ({"weights": np.zeros(4)}, "weights.*zero"),
        ({"source": np.zeros((0, 2)), "target": np.zeros((0, 2))}, "no cell"),
    ],
)
def test_invalid_input_raises(change, message):
    arguments = {"source": np.eye(4, 2), "target": np.eye(4, 2)} | change
    with pytest.raises(ValueError, match=message):
        rigid_align(**arguments)
