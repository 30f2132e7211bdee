"""Standard deviations from few draws: those of many draws, for counts and for values that are not counts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import spearmanr

from alphastomics.sampling._calibration import pooled_sd

N, G = 2000, 6


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def counts(rng, n_draws, mean, theta=2.0):
    """Negative binomial of mean m and variance m + m² / theta."""
    return rng.poisson(rng.gamma(theta, mean / theta, size=(n_draws, *mean.shape))).astype(np.float32)


def test_counts_have_the_variance_that_belongs_to_their_mean(rng):
    mean = rng.gamma(0.5, 0.4, size=(N, G)).astype(np.float32)
    draws = counts(rng, 8, mean)
    true = np.sqrt(mean + mean**2 / 2)
    sd = pooled_sd(draws, mean, counts=True)
    alone = draws.std(0, ddof=1)
    assert np.median(np.abs(sd / true - 1)) < 0.1
    assert np.median(np.abs(alone / true - 1)) > 0.3
    assert spearmanr(sd[:, 0], true[:, 0]).statistic > 0.95
    assert spearmanr(alone[:, 0], true[:, 0]).statistic < 0.85


def test_values_shared_by_all_draws_are_kept(rng):
    """Cells of the same mean differ in their spread: with many draws each has its own."""
    true = np.exp(rng.normal(size=(N, 1))) * np.ones(G)
    mean = np.zeros((N, G), dtype=np.float32)
    many, few = (
        pooled_sd((true * rng.normal(size=(n, N, G))).astype(np.float32), mean, counts=False) for n in (200, 4)
    )
    assert spearmanr(many[:, 0], true[:, 0]).statistic > 0.95
    assert np.abs(np.log(few / true)).mean() > 2 * np.abs(np.log(many / true)).mean()


def test_equal_cells_have_equal_spread(rng):
    draws = (3 * rng.normal(size=(8, N, G))).astype(np.float32)
    sd = pooled_sd(draws, np.zeros((N, G), dtype=np.float32), counts=False)
    np.testing.assert_allclose(sd, 3, rtol=0.1)
    assert draws.std(0, ddof=1).std() > 5 * sd.std()


def test_observed_values_have_no_weight(rng):
    mean = rng.gamma(0.5, 0.4, size=(N, G)).astype(np.float32)
    draws, drawn = counts(rng, 8, mean), np.ones((N, G), dtype=bool)
    drawn[::2], drawn[:, 0] = False, False
    sd = pooled_sd(np.where(drawn, draws, 7), mean, drawn, counts=True)
    assert (sd[~drawn] == 0).all()
    alone = pooled_sd(draws[:, 1::2, 1:], mean[1::2, 1:], counts=True)
    np.testing.assert_allclose(sd[1::2, 1:], alone, rtol=1e-6)


def test_one_draw_has_no_standard_deviation(rng):
    drawn = rng.random((N, G)) < 0.5
    sd = pooled_sd(np.ones((1, N, G), dtype=np.float32), np.ones((N, G), dtype=np.float32), drawn, counts=True)
    assert np.isnan(sd[drawn]).all()
    assert (sd[~drawn] == 0).all()


@pytest.mark.parametrize("n_draws", [2, 3, 4])
@pytest.mark.parametrize("as_counts", [True, False])
def test_draws_that_agree_have_no_spread(n_draws, as_counts):
    same = np.tile(np.arange(12, dtype=np.float32).reshape(1, 4, 3) % 3, (n_draws, 1, 1))  # gene 0 is 0 everywhere
    np.testing.assert_array_equal(pooled_sd(same, same[0], counts=as_counts), 0)
