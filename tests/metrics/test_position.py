"""All scores together: what they are invariant to, their floor and their ceiling."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from alphastomics import metrics
from alphastomics.metrics import chance_positions, oracle_positions, position_scores, subsample_cells

KEYS = [
    "distance_spearman",
    "distance_spearman_median",
    "knn_preservation",
    "contact_precision",
    "aligned_rmsd",
    "procrustes_disparity",
    "distance_matrix_mse",
    "nearest_neighbor_ks",
    "rigid_rmsd",
]
PERFECT = dict(zip(KEYS, [1, 1, 1, 1, 0, 0, 0, 0, 0], strict=True))


def noisy_tissue(seed: int = 0, n: int = 80, n_dims: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    true = rng.uniform(size=(n, n_dims))
    return true, true + rng.normal(scale=0.1, size=true.shape)


def moved(positions: np.ndarray, seed: int, shift: float, *, mirrored: bool = False) -> np.ndarray:
    """Turned at random, mirrored or not, and shifted."""
    n_dims = positions.shape[1]
    rotation = np.linalg.qr(np.random.default_rng(seed).normal(size=(n_dims, n_dims)))[0]
    rotation[:, 0] *= np.sign(np.linalg.det(rotation)) * (-1 if mirrored else 1)
    return positions @ rotation + shift


def test_all_scores_match_the_single_functions():
    true, predicted = noisy_tissue()
    scores = position_scores(true, predicted, n_neighbors=7, contact_share=0.1, random_state=3)
    assert list(scores) == KEYS
    expected = [
        metrics.distance_spearman(true, predicted),
        metrics.distance_spearman(true, predicted, reduce="median"),
        metrics.knn_preservation(true, predicted, n_neighbors=7),
        metrics.contact_precision(true, predicted, share=0.1),
        metrics.aligned_rmsd(true, predicted),
        metrics.procrustes_disparity(true, predicted),
        metrics.distance_matrix_mse(true, predicted),
        metrics.nearest_neighbor_ks(true, predicted),
        metrics.rigid_rmsd(true, predicted),
    ]
    assert list(scores.values()) == pytest.approx(expected)
    assert all(type(value) is float for value in scores.values())


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    n_dims=st.sampled_from([2, 3]),
    shift=st.floats(-100, 100),
    side=st.sampled_from(["true", "predicted"]),
    mirrored=st.booleans(),
)
def test_scores_do_not_depend_on_the_frame(seed, n_dims, shift, side, mirrored):
    true, predicted = noisy_tissue(seed, n_dims=n_dims)
    scores = position_scores(true, predicted)
    again = position_scores(
        moved(true, seed + 1, shift, mirrored=mirrored) if side == "true" else true,
        moved(predicted, seed + 1, shift, mirrored=mirrored) if side == "predicted" else predicted,
    )
    if mirrored and n_dims == 3:
        assert again.pop("rigid_rmsd") > 2 * scores.pop("rigid_rmsd")
    assert again == pytest.approx(scores, abs=1e-9)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_scores_do_not_depend_on_the_order_of_the_cells(seed):
    true, predicted = noisy_tissue(seed)
    order = np.random.default_rng(seed).permutation(len(true))
    assert position_scores(true[order], predicted[order]) == pytest.approx(position_scores(true, predicted), abs=1e-9)


def test_the_truth_in_another_frame_is_perfect():
    true, _ = noisy_tissue()
    for mirrored in (False, True):
        assert position_scores(true, moved(true, 1, 5.0, mirrored=mirrored)) == pytest.approx(PERFECT, abs=1e-6)
    shifted = position_scores(true, true + 1, align=False)
    assert shifted["aligned_rmsd"] == shifted["rigid_rmsd"] > 1


def test_noise_makes_every_score_worse():
    true, predicted = noisy_tissue()
    near, far = (position_scores(true, true + share * (predicted - true)) for share in (0.05, 1.0))
    for key, perfect in PERFECT.items():
        assert abs(near[key] - perfect) < abs(far[key] - perfect), key


def test_max_cells_scores_the_subsampled_cells():
    true, predicted = noisy_tissue()
    chosen = subsample_cells(80, 50, seed=4)
    expected = position_scores(true[chosen], predicted[chosen], random_state=4)
    assert position_scores(true, predicted, max_cells=50, random_state=4) == pytest.approx(expected)


@pytest.mark.parametrize("n", [0, 1])
def test_scores_of_too_few_cells_are_nan(n):
    scores = position_scores(np.zeros((n, 2)), np.zeros((n, 2)))
    assert list(scores) == KEYS
    assert np.isnan(list(scores.values())).all()


def test_few_cells_have_no_neighborhood_but_the_other_scores():
    true, predicted = noisy_tissue(n=15)
    scores = position_scores(true, predicted)
    assert [key for key in KEYS if np.isnan(scores[key])] == ["knn_preservation"]


def test_chance_keeps_the_outline_and_nothing_else():
    true, _ = noisy_tissue(n=600)
    shuffled = chance_positions(true, 1)
    np.testing.assert_array_equal(np.sort(shuffled, axis=0), np.sort(true, axis=0))
    np.testing.assert_array_equal(shuffled, chance_positions(true, 1))
    assert (shuffled != chance_positions(true, 2)).any()
    scores = position_scores(true, shuffled)
    assert scores["knn_preservation"] == pytest.approx(20 / 599, abs=0.01)
    assert scores["contact_precision"] == pytest.approx(0.05, abs=0.01)
    assert abs(scores["distance_spearman"]) < 0.1
    assert scores["nearest_neighbor_ks"] == 0


def test_oracle_shuffles_within_types_only():
    true, _ = noisy_tissue(n=60)
    types = np.array(["a", "b", None], dtype=object)[np.arange(60) % 3]
    shuffled = oracle_positions(true, types, 1)
    assert (shuffled != true).any()
    for kind in ("a", "b", None):
        cells = types == kind
        np.testing.assert_array_equal(np.sort(shuffled[cells], axis=0), np.sort(true[cells], axis=0))
    np.testing.assert_array_equal(oracle_positions(true, np.arange(60)), true)
    with pytest.raises(ValueError, match="type.*59.*60"):
        oracle_positions(true, types[1:])


def test_metrics_do_not_import_torch():
    code = "import sys, alphastomics.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_thirty_thousand_cells_in_bounded_memory():
    """A matrix of all their distances would be 7.2 GB."""
    code = """
import numpy as np
from pathlib import Path
from alphastomics.metrics import position_scores
rng = np.random.default_rng(0)
true = rng.uniform(size=(30_000, 2))
scores = position_scores(true, true + rng.normal(scale=.01, size=true.shape))
assert .99 < scores["distance_spearman"] < 1
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
assert int(status["VmHWM"].split()[0]) < 2 * 1024**2  # ru_maxrss would start at the memory of the parent process
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
