"""Rigid alignment against scipy and brute force, and its invariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.linalg import orthogonal_procrustes
from scipy.spatial.transform import Rotation
from scipy.stats import kstest

from alphastomics.diffusion.geometry import align, center, kabsch, masked_mean, rotate
from rotations import random_rotation

seeds = st.integers(0, 10_000)
dimensions = st.sampled_from([2, 3])


def clouds(seed: int, n: int = 12, n_dims: int = 3, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    """Centered points, and what a rotation or reflection and noise make of them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n_dims))
    y = x @ orthogonal(seed, n_dims) + noise * rng.normal(size=(n, n_dims))
    return x - x.mean(0), y - y.mean(0)


def orthogonal(seed: int, n_dims: int) -> np.ndarray:
    return random_rotation(n_dims, torch.Generator().manual_seed(seed)).double().numpy()


def batch(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(array)[None] for array in arrays)


def residual(x: np.ndarray, rotation: np.ndarray, y: np.ndarray) -> float:
    return float(((x @ rotation - y) ** 2).sum())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weighted", [False, True])
def test_rotations_in_3d_match_scipy(seed, weighted):
    x, y = clouds(seed)
    weight = np.random.default_rng(seed).uniform(0, 2, len(x)) if weighted else np.ones(len(x))
    expected = Rotation.align_vectors(y, x, weights=weight)[0].as_matrix().T
    actual = kabsch(*batch(x, y, weight), reflection=False)[0]
    np.testing.assert_allclose(actual, expected, atol=1e-9)
    assert np.linalg.det(actual) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n_dims", [2, 3])
def test_with_reflections_it_is_the_orthogonal_procrustes_problem(seed, n_dims):
    x, y = clouds(seed, n_dims=n_dims)
    np.testing.assert_allclose(kabsch(*batch(x, y))[0], orthogonal_procrustes(x, y)[0], atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("reflection", [False, True])
def test_no_angle_in_2d_is_better(seed, reflection):
    x, y = clouds(seed, n_dims=2)
    angle = np.linspace(0, 2 * np.pi, 3601)
    turns = np.stack([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]).transpose(2, 0, 1)
    if reflection:
        turns = np.concatenate([turns, np.diag([1.0, -1.0]) @ turns])
    best = min(residual(x, turn, y) for turn in turns)
    actual = residual(x, kabsch(*batch(x, y), reflection=reflection)[0].numpy(), y)
    assert actual <= best + 1e-9
    assert actual == pytest.approx(best, rel=1e-4)


@pytest.mark.parametrize("n_dims", [2, 3])
def test_the_reflection_switch_decides_about_mirror_images(n_dims):
    x, _ = clouds(0, n_dims=n_dims)
    mirrored = x * np.r_[-1.0, np.ones(n_dims - 1)]
    assert residual(x, kabsch(*batch(x, mirrored))[0].numpy(), mirrored) < 1e-18
    proper = kabsch(*batch(x, mirrored), reflection=False)[0].numpy()
    assert np.linalg.det(proper) == pytest.approx(1)
    assert residual(x, proper, mirrored) > 0.1


@given(seed=seeds, n_dims=dimensions)
def test_any_rotation_or_reflection_is_found_again(seed, n_dims):
    x, _ = clouds(seed, n_dims=n_dims)
    turn = orthogonal(seed, n_dims)
    np.testing.assert_allclose(kabsch(*batch(x, x @ turn))[0], turn, atol=1e-6)


@given(seed=seeds, n_dims=dimensions, reflection=st.booleans())
def test_alignment_does_not_depend_on_the_source_frame(seed, n_dims, reflection):
    x, y = clouds(seed, n_dims=n_dims)
    turn = orthogonal(seed + 1, n_dims)
    turn[0] *= 1 if reflection else np.sign(np.linalg.det(turn))
    expected = align(*batch(x, y + 5), reflection=reflection)
    moved = align(*batch(x @ turn - 7, y + 5), reflection=reflection)
    np.testing.assert_allclose(moved, expected, atol=1e-6)


@given(seed=seeds, n_dims=dimensions)
def test_alignment_follows_the_target(seed, n_dims):
    x, y = clouds(seed, n_dims=n_dims)
    turn = orthogonal(seed + 1, n_dims)
    expected = align(*batch(x, y))[0].numpy() @ turn + 3
    np.testing.assert_allclose(align(*batch(x, y @ turn + 3))[0], expected, atol=1e-6)


def test_whole_weights_are_repetitions():
    x, y = clouds(0)
    times = np.random.default_rng(0).integers(0, 4, len(x))
    repeated = kabsch(*batch(np.repeat(x, times, axis=0), np.repeat(y, times, axis=0)))
    np.testing.assert_allclose(kabsch(*batch(x, y, times.astype(float))), repeated, atol=1e-9)


def test_padding_values_change_nothing():
    x, y = batch(*clouds(0, n=9))
    mask = torch.arange(14)[None] < 9
    padding = torch.full((1, 5, 3), 1e3, dtype=torch.float64)
    longer_x, longer_y = torch.cat([x, padding], 1), torch.cat([y, -padding], 1)
    np.testing.assert_allclose(align(longer_x, longer_y, mask)[:, :9], align(x, y), atol=1e-9)
    centered = center(longer_x + 3, mask)
    np.testing.assert_allclose(centered[:, :9], center(x), atol=1e-9)
    assert torch.equal(centered[:, 9:], torch.zeros_like(padding))


def test_contexts_of_a_batch_do_not_mix():
    pairs = [clouds(seed) for seed in range(3)]
    together = kabsch(*(torch.from_numpy(np.stack(side)) for side in zip(*pairs, strict=True)))
    for rotation, pair in zip(together, pairs, strict=True):
        np.testing.assert_allclose(rotation, kabsch(*batch(*pair))[0], atol=1e-12)


@pytest.mark.parametrize("n_dims", [2, 3])
def test_values_that_are_not_finite_raise_no_error(n_dims):
    x = torch.randn(1, 4, n_dims)
    kabsch(x, torch.full_like(x, torch.nan))


def test_a_context_of_padding_alone_stays_finite():
    x, mask = torch.ones(1, 4, 2), torch.zeros(1, 4, dtype=torch.bool)
    assert torch.equal(masked_mean(x, mask), torch.zeros(1, 1, 2))
    assert bool(align(x, x, mask).isfinite().all())
    assert bool(kabsch(torch.zeros(1, 4, 2), x).isfinite().all())


@pytest.mark.parametrize(
    ("given_", "computed"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_precision_is_at_least_single_and_never_lost(given_, computed):
    x, y = (a.to(given_) for a in batch(*clouds(0)))
    assert kabsch(x, y).dtype == computed
    assert align(x.to(computed), y.to(computed)).dtype == computed


def test_autocast_does_not_round_positions():
    """Under autocast a plain ``x @ R`` is a product of bfloat16: three digits."""
    x, y = (a.float() for a in batch(*clouds(0, n=200)))
    rotation = kabsch(x, y)
    exact = align(x.double(), y.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert float((x @ rotation - exact).abs().max()) > 1e-3
        inside = kabsch(x, y), rotate(x, rotation), align(x, y)
        centered = center(x + 3)
    torch.testing.assert_close(inside[0], rotation, atol=1e-6, rtol=0)
    torch.testing.assert_close(inside[1].double(), x.double() @ rotation.double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(inside[2].double(), exact, atol=1e-5, rtol=0)
    torch.testing.assert_close(centered, x, atol=1e-5, rtol=0)


def test_no_gradient_goes_through_the_decomposition():
    x, y = (a.requires_grad_() for a in batch(*clouds(0)))
    rotation = kabsch(x, y)
    assert not rotation.requires_grad
    (gradient,) = torch.autograd.grad(rotate(x, rotation).sum(), x)
    torch.testing.assert_close(gradient, torch.ones_like(x.detach()) @ rotation.mT)


def test_random_rotations_are_uniform_over_the_orthogonal_group():
    generator = torch.Generator().manual_seed(0)
    turns = torch.stack([random_rotation(2, generator) for _ in range(2000)]).double().numpy()
    np.testing.assert_allclose(turns @ turns.transpose(0, 2, 1), np.broadcast_to(np.eye(2), turns.shape), atol=1e-6)
    proper = np.linalg.det(turns) > 0
    assert 0.45 < proper.mean() < 0.55
    for some in (turns[proper], turns[~proper]):
        angle = np.arctan2(some[:, 0, 1], some[:, 0, 0])
        assert kstest(angle, "uniform", args=(-np.pi, 2 * np.pi)).pvalue > 0.01


def test_random_rotations_depend_on_the_generator_alone():
    first = random_rotation(3, torch.Generator().manual_seed(5))
    torch.manual_seed(99)
    assert torch.equal(first, random_rotation(3, torch.Generator().manual_seed(5)))
    assert not torch.equal(first, random_rotation(3, torch.Generator().manual_seed(6)))
