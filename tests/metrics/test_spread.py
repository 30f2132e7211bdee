"""Scores of uncertainties, against closed forms of Gaussians."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.spatial.transform import Rotation

from alphastomics.metrics import spread_scores

N = 20_000


def gaussian(n_dims: int, *, n: int = N) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Truth, prediction and uncertainty; the spread differs between cells and is small beside the tissue."""
    rng = np.random.default_rng(n_dims)
    predicted, u = 50 * rng.normal(size=(n, n_dims)), np.exp(0.5 * rng.normal(size=n))
    return predicted + u[:, None] * rng.normal(size=predicted.shape) / np.sqrt(n_dims), predicted, u


@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_calibrated_uncertainty(n_dims, share):
    true, predicted, u = gaussian(n_dims)
    scores = spread_scores(true, predicted, u, share=share)
    assert list(scores) == ["coverage", "spread_over_error", "spread_spearman"]
    assert all(type(value) is float for value in scores.values())
    assert scores["coverage"] == pytest.approx(share, abs=0.015)
    assert scores["spread_over_error"] == pytest.approx(1, abs=0.03)
    error = np.linalg.norm(true - predicted, axis=1)
    assert scores["spread_spearman"] == pytest.approx(stats.spearmanr(u, error).statistic, abs=1e-3)
    assert scores["spread_spearman"] > 0.4


@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wrong_size_of_the_uncertainty(n_dims, factor):
    true, predicted, u = gaussian(n_dims)
    scores = spread_scores(true, predicted, factor * u)
    expected = stats.chi2.cdf(factor**2 * stats.chi2.ppf(0.8, n_dims), n_dims)
    assert scores["coverage"] == pytest.approx(expected, abs=0.015)
    assert scores["spread_over_error"] == pytest.approx(factor, rel=0.03)
    assert scores["spread_spearman"] == pytest.approx(spread_scores(true, predicted, u)["spread_spearman"])


def test_few_draws_reduce_the_coverage_to_a_share_of_an_f_distribution():
    true, predicted, u = gaussian(2)
    draws = u[:, None] * np.random.default_rng(0).normal(size=(4, *true.shape)) / np.sqrt(2)
    estimated = np.sqrt(np.square(draws).sum(axis=2).mean(axis=0))
    expected = stats.f.cdf(stats.chi2.ppf(0.8, 2) / 2, 2, 8)
    assert expected < 0.76
    assert spread_scores(true, predicted, estimated)["coverage"] == pytest.approx(expected, abs=0.015)


def test_an_unrelated_uncertainty_has_no_rank_correlation():
    true, predicted, u = gaussian(2)
    scores = spread_scores(true, predicted, np.random.default_rng(0).permutation(u))
    assert abs(scores["spread_spearman"]) < 0.02
    assert np.isnan(spread_scores(true, predicted, np.ones(N))["spread_spearman"])


def test_a_rotation_and_a_shift_do_not_matter_unless_the_frames_agree():
    true, predicted, u = gaussian(3, n=500)
    turned = Rotation.from_euler("xyz", [1, 2, 3]).apply(predicted) + 9
    assert spread_scores(true, turned, u) == pytest.approx(spread_scores(true, predicted, u))
    assert spread_scores(true, turned, u, align=False)["coverage"] < 0.05
    assert spread_scores(true, -turned, u)["coverage"] < 0.05
    assert spread_scores(true, -turned, u, reflection=True) == pytest.approx(spread_scores(true, predicted, u))
    assert spread_scores(true, turned / 2, u / 2)["spread_over_error"] < 0.1  # other units


def test_cells_without_an_uncertainty_are_not_scored():
    true, predicted, u = gaussian(2, n=100)
    missing = np.where(np.arange(100) < 50, np.nan, u)
    found = spread_scores(true, predicted, missing, align=False)
    assert found == spread_scores(true[50:], predicted[50:], u[50:], align=False)
    assert np.isnan(list(spread_scores(true, predicted, np.full(100, np.nan)).values())).all()
    assert np.isnan(list(spread_scores(true[:0], predicted[:0], u[:0]).values())).all()


def test_a_perfect_prediction_has_full_coverage():
    true, _, u = gaussian(2, n=100)
    scores = spread_scores(true, true, u, align=False)
    assert scores["coverage"] == 1
    assert np.isnan([scores["spread_over_error"], scores["spread_spearman"]]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uncertainty": np.ones(3)}, "uncertainty"),
        ({"uncertainty": [1, -1, 1, 1]}, "uncertainty"),
        ({"uncertainty": [1, np.inf, 1, 1]}, "uncertainty"),
        ({"share": 1.0}, "share"),
        ({"predicted": np.eye(3, 2)}, "predicted"),
        ({"predicted": np.full((4, 2), np.nan)}, "predicted"),
    ],
)
def test_invalid_input_raises(change, message):
    arguments = {"true": np.eye(4, 2), "predicted": np.eye(4, 2), "uncertainty": np.ones(4)} | change
    with pytest.raises(ValueError, match=message):
        spread_scores(**arguments)
