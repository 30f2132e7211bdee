from __future__ import annotations

import numpy as np
import pytest

from benchmarks import likelihood


def test_the_rate_is_where_the_likelihood_is_greatest():
    rng = np.random.default_rng(0)
    size, theta = rng.uniform(50, 500, 40), np.array([0.5, 3.0])
    counts = likelihood.negative_binomial(size[:, None] * np.array([0.01, 0.05]), theta, rng)
    rate = likelihood.rates(counts, size, np.arange(40)[None], theta)[0]

    def log_likelihood(value):
        mean = size[:, None] * value
        return (counts * np.log(mean / (mean + theta)) - theta * np.log(mean + theta)).sum(0)

    for factor in (0.97, 1.03):
        assert (log_likelihood(rate) > log_likelihood(factor * rate)).all()


def test_without_dispersion_the_rate_matches_the_sums():
    rng = np.random.default_rng(1)
    size, counts = rng.uniform(50, 500, 30), rng.poisson(3.0, (30, 4)).astype(float)
    near = np.stack([rng.permutation(30)[:10] for _ in range(6)])
    expected = counts[near].sum(1) / size[near].sum(1)[:, None]
    np.testing.assert_allclose(likelihood.rates(counts, size, near, np.full(4, 1e12)), expected, rtol=1e-6)


def test_dispersion_is_found_again():
    rng = np.random.default_rng(2)
    mean, theta = rng.uniform(1, 9, (20_000, 3)), np.array([0.5, 2.0, 20.0])
    drawn = likelihood.negative_binomial(mean, theta, rng)
    np.testing.assert_allclose(drawn.mean(0), mean.mean(0), rtol=0.05)
    np.testing.assert_allclose(likelihood.dispersion(drawn, mean), theta, rtol=0.15)


def test_a_copy_of_the_truth_has_likeness_one():
    x = np.random.default_rng(3).poisson(1.0, (200, 6)).astype(float)
    assert likelihood.likeness(x, x) == pytest.approx({"genes": 1, "zeros": 1})
    assert likelihood.likeness(x + 1, x)["zeros"] == 0
