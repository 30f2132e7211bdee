from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.spatial import procrustes
from scipy.spatial.distance import cdist, pdist
from scipy.stats import ks_2samp, spearmanr
from sklearn.neighbors import NearestNeighbors

from benchmarks import _data, _placement


@pytest.fixture
def pair() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(90, 2)) * [3.0, 1.0]
    return truth, truth + rng.normal(scale=0.6, size=truth.shape)


def similarity(x: np.ndarray, seed: int, scale: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(x.shape[1], x.shape[1])))[0]
    return scale * x @ rotation + rng.normal(size=x.shape[1])


def test_knn_equals_sklearn(pair):
    truth, predicted = pair
    near = [NearestNeighbors(n_neighbors=20).fit(p).kneighbors(return_distance=False) for p in (truth, predicted)]
    expected = np.mean([len(set(a) & set(b)) / 20 for a, b in zip(*near, strict=True)])
    assert _placement.knn_preservation(truth, predicted, 20) == pytest.approx(expected, abs=1e-12)


def test_knn_excludes_the_cell_itself_among_coinciding_cells():
    positions = np.zeros((30, 2))
    near = _placement.nearest_neighbors(positions, 5)
    assert near.shape == (30, 5)
    assert not (near == np.arange(30)[:, None]).any()


def test_spearman_equals_scipy(pair):
    truth, predicted = pair
    a, b = cdist(truth, truth), cdist(predicted, predicted)
    expected = [spearmanr(np.delete(a[i], i), np.delete(b[i], i)).statistic for i in range(len(a))]
    assert _placement.distance_spearman(truth, predicted) == pytest.approx(np.mean(expected), abs=1e-12)


def test_rmsd_equals_scipy_procrustes(pair):
    truth, predicted = pair
    assert _placement.aligned_rmsd(truth, predicted) == pytest.approx(
        np.sqrt(procrustes(truth, predicted)[2]), abs=1e-12
    )


def test_contact_precision_equals_a_sort(pair):
    truth, predicted = pair
    a, b = pdist(truth), pdist(predicted)
    m = round(0.05 * len(a))
    expected = len(set(np.argsort(a)[:m]) & set(np.argsort(b)[:m])) / m
    assert _placement.contact_precision(truth, predicted, 0.05) == pytest.approx(expected)


def test_nearest_neighbor_ks_equals_scipy(pair):
    truth, predicted = pair
    nearest = []
    for positions in pair:
        distance = cdist(positions, positions)
        np.fill_diagonal(distance, np.inf)
        nearest.append(distance.min(axis=1))
    assert _placement.nearest_neighbor_ks(truth, predicted) == pytest.approx(ks_2samp(*nearest).statistic, abs=1e-12)


def test_collapse_scores_like_chance(pair):
    truth = pair[0]
    scores = _placement.score(truth, np.zeros_like(truth))
    assert scores["aligned_rmsd"] == 1
    assert scores["distance_spearman"] == 0
    assert scores["contact_5"] == pytest.approx(0.05, abs=0.001)
    assert scores["nn_ks"] == 1


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), scale=st.floats(0.1, 10))
def test_scores_do_not_depend_on_the_frame(seed, scale):
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(60, 3))
    predicted = truth + rng.normal(scale=0.3, size=truth.shape)
    before, after = _placement.score(truth, predicted), _placement.score(truth, similarity(predicted, seed, scale))
    spacing = before.pop("nn_ks")
    del after["nn_ks"]  # the only score that depends on the scale
    assert after == pytest.approx(before, abs=1e-9)
    # Two cells that are each other's nearest share one distance, and rounding may order it either way.
    assert _placement.score(truth, similarity(predicted, seed, 1.0))["nn_ks"] == pytest.approx(spacing, abs=0.04)


def test_truth_is_perfect(pair):
    truth = pair[0]
    scores = _placement.score(truth, truth[:, ::-1])
    assert scores == pytest.approx(
        {"knn_20": 1, "distance_spearman": 1, "aligned_rmsd": 0, "contact_5": 1, "nn_ks": 0}, abs=1e-6
    )


def test_invalid_predictions_raise(pair):
    truth, predicted = pair
    with pytest.raises(ValueError, match="shape"):
        _placement.score(truth, predicted[:-1])
    predicted[3, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        _placement.score(truth, predicted)


def test_rigid_fit_finds_a_reflection():
    rng = np.random.default_rng(0)
    source = rng.normal(size=(20, 2))
    target = source @ np.array([[0.0, 1.0], [1.0, 0.0]]) + [3, -1]
    rotation, shift = _placement.rigid_fit(source, target)
    np.testing.assert_allclose(source @ rotation + shift, target, atol=1e-12)


@pytest.mark.real
@pytest.mark.slow
def test_published_figures_come_out(real_data):
    # Independent measurements: truth with noise of 5 % of the longer side, and cells shuffled within their type.
    (fold,) = _data.seqfish(real_data)
    truth = fold.truth
    noise = np.random.default_rng(0).normal(scale=0.05 * np.ptp(truth, axis=0).max(), size=truth.shape)
    noisy = _placement.score(truth, truth + noise)
    assert [noisy[m] for m in _placement.METRICS[:4]] == pytest.approx([0.083, 0.930, 0.235, 0.451], abs=0.004)
    # The shuffle itself moves the correlation by about .008 (sd over seeds).
    rng, shuffled = np.random.default_rng(0), truth.copy()
    for label in np.unique(fold.labels):
        rows = np.flatnonzero(fold.labels == label)
        shuffled[rows] = truth[rng.permutation(rows)]
    within = _placement.score(truth, shuffled)
    assert [within[m] for m in _placement.METRICS[:4]] == pytest.approx([0.023, 0.352, 0.826, 0.136], abs=0.02)
