"""Scores of distances against dense float64 references, scipy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist, pdist
from scipy.stats import spearmanr
from sklearn.metrics import mean_squared_error, precision_score

from alphastomics.metrics import _distances, contact_precision, distance_matrix_mse, distance_spearman, subsample_cells


def noisy_tissue(n: int = 150, n_dims: int = 2, noise: float = 0.3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n + n_dims)
    true = rng.uniform(-1, 1, size=(n, n_dims)) + 100
    return true, true + rng.normal(scale=noise, size=true.shape)


def gridded(n_side: int = 9) -> tuple[np.ndarray, np.ndarray]:
    """A grid and a permuted one, rounded: ties and duplicates everywhere."""
    grid = np.stack(np.meshgrid(np.arange(n_side), np.arange(n_side)), -1).reshape(-1, 2).astype(float)
    return grid, np.round(grid + np.random.default_rng(0).normal(size=grid.shape))


@pytest.mark.parametrize("n_dims", [2, 3])
def test_distance_matrix_mse_equals_the_dense_one(n_dims):
    true, predicted = noisy_tissue(n_dims=n_dims)
    assert distance_matrix_mse(true, predicted) == pytest.approx(
        mean_squared_error(pdist(true), pdist(predicted)), rel=1e-9
    )


@pytest.mark.parametrize("pair", [noisy_tissue(), noisy_tissue(n_dims=3), gridded()])
def test_distance_spearman_equals_scipy_row_by_row(pair):
    true, predicted = pair
    a, b = cdist(true, true), cdist(predicted, predicted)
    rows = np.array([spearmanr(a[i], b[i]).statistic for i in range(len(true))])
    assert distance_spearman(true, predicted) == pytest.approx(rows.mean(), abs=1e-9)
    assert distance_spearman(true, predicted, reduce="median") == pytest.approx(np.median(rows), abs=1e-9)
    chosen = subsample_cells(len(true), 31, seed=5)
    expected = rows[chosen].mean()
    assert distance_spearman(true, predicted, n_rows=31, random_state=5) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("pair", [noisy_tissue(), noisy_tissue(n_dims=3), gridded()])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.5, 1.0])
def test_contact_precision_equals_the_dense_one(pair, share):
    true, predicted = pair
    contacts = [d <= np.quantile(d, share, method="lower") for d in (pdist(true), pdist(predicted))]
    assert contact_precision(true, predicted, share=share) == pytest.approx(precision_score(*contacts), abs=1e-12)


def test_equal_distances_remain_equal_in_a_rotated_grid():
    x, y = np.divmod(np.arange(400), 20)
    grid = 50.0 * np.c_[2 * x + y % 2, y * np.sqrt(3)]
    turned = grid @ [[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]]
    assert contact_precision(grid, turned) == contact_precision(turned, grid) == 1


def test_contact_precision_of_many_cells_matches_a_subsample(monkeypatch):
    true, predicted = noisy_tissue(300)
    chosen = subsample_cells(300, 200)
    expected = contact_precision(true[chosen], predicted[chosen])
    assert expected != contact_precision(true, predicted)
    monkeypatch.setattr(_distances, "MAX_CONTACT_CELLS", 200)
    assert contact_precision(true, predicted) == expected


@pytest.mark.parametrize("entries", [1, 700, 10**9])
def test_chunks_change_nothing(monkeypatch, entries):
    true, predicted = noisy_tissue()
    expected = distance_matrix_mse(true, predicted), distance_spearman(true, predicted)
    monkeypatch.setattr(_distances, "CHUNK_ENTRIES", entries)
    assert (distance_matrix_mse(true, predicted), distance_spearman(true, predicted)) == pytest.approx(
        expected, rel=1e-12
    )


def test_chunks_are_bounded(monkeypatch):
    monkeypatch.setattr(_distances, "CHUNK_ENTRIES", 1000)
    chunks = list(_distances.row_chunks(95, 90))
    assert np.concatenate([np.r_[rows] for rows in chunks]).tolist() == list(range(95))
    assert max((rows.stop - rows.start) * 90 for rows in chunks) <= 1000


def test_a_collapsed_prediction_ranks_nothing():
    true, predicted = noisy_tissue()
    assert distance_spearman(true, np.zeros_like(predicted)) == 0
    assert contact_precision(true, np.zeros_like(predicted)) == pytest.approx(0.05, abs=1e-3)
    assert np.isnan(distance_spearman(np.zeros_like(true), predicted))


def test_too_few_cells_have_no_score():
    one = np.zeros((1, 2))
    assert np.isnan([f(one, one) for f in (distance_matrix_mse, distance_spearman, contact_precision)]).all()


def test_subsampled_cells_match_the_published_scores():
    expected = np.sort(np.random.default_rng(0).permutation(7661)[:4000])
    np.testing.assert_array_equal(subsample_cells(7661), expected)
    np.testing.assert_array_equal(subsample_cells(30), np.arange(30))
    with pytest.raises(ValueError, match="n=-1"):
        subsample_cells(30, -1)


@pytest.mark.parametrize("function", [distance_matrix_mse, distance_spearman, contact_precision])
def test_invalid_positions_raise(function):
    true, predicted = noisy_tissue()
    with pytest.raises(ValueError, match=r"\(150, 2\).*\(149, 2\)"):
        function(true, predicted[1:])
    predicted[[3, 4], 0] = np.nan
    with pytest.raises(ValueError, match="2 .*positions"):
        function(true, predicted)


def test_invalid_options_raise():
    true, predicted = noisy_tissue()
    with pytest.raises(ValueError, match="share"):
        contact_precision(true, predicted, share=0)
    with pytest.raises(ValueError, match="reduce"):
        distance_spearman(true, predicted, reduce="max")
