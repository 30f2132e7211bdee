from __future__ import annotations

import pytest
import torch

from alphastomics.diffusion.geometry import center
from alphastomics.sampling._posterior import estimate_posterior


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def posterior_mean(y: torch.Tensor, n: float, m: torch.Tensor, sd: float) -> torch.Tensor:
    """E[x | y] for x ~ N(m, sd^2) and y ~ N(x, n^2)."""
    return (m / sd**2 + y / n**2) / (sd**-2 + n**-2)


@pytest.mark.parametrize("sd", [0.05, 0.5, 3.0])
def test_gaussian_posterior_from_one_estimate(sd):
    m, n = draw(1, 40, 2, seed=0), 0.4
    x = m + sd * draw(1, 40, 2, seed=1)
    y = x + n * draw(1, 40, 2, seed=2)
    posterior = estimate_posterior(
        lambda y: posterior_mean(y, n, m, sd), y, torch.tensor(n, dtype=torch.float64), centered=False
    )
    assert float(posterior.precision) == pytest.approx(sd**-2)
    torch.testing.assert_close(posterior.weighted_mean, m / sd**2)
    finer = 0.1
    y = x + finer * draw(1, 40, 2, seed=3)
    estimate, error = posterior.estimate(y, torch.tensor(finer, dtype=torch.float64))
    torch.testing.assert_close(estimate, posterior_mean(y, finer, m, sd))
    assert float(error) == pytest.approx((sd**-2 + finer**-2) ** -0.5)


def test_a_denoiser_without_information_returns_the_noisy_positions():
    y, n = draw(1, 30, 3, seed=0), torch.tensor(0.2, dtype=torch.float64)
    posterior = estimate_posterior(lambda y: y, y, n, centered=False)
    assert float(posterior.precision) == pytest.approx(0, abs=1e-9)
    estimate, error = posterior.estimate(y, 0.5 * n)
    torch.testing.assert_close(estimate, y)
    assert float(error) == pytest.approx(0.1)


def test_probes_of_centered_positions_are_centered():
    m, n, sd = center(draw(1, 12, 2, seed=0)), 0.4, 0.3
    y = center(m + draw(1, 12, 2, seed=1))
    posterior = estimate_posterior(
        lambda y: posterior_mean(center(y), n, m, sd), y, torch.tensor(n, dtype=torch.float64), centered=True
    )
    assert float(posterior.precision) == pytest.approx(sd**-2)
    torch.testing.assert_close(posterior.weighted_mean.mean(1), torch.zeros(1, 2, dtype=torch.float64))


def test_a_certain_denoiser_is_finite():
    m, n = draw(1, 9, 2, seed=0), torch.tensor(0.3, dtype=torch.float64)
    posterior = estimate_posterior(lambda y: m.expand_as(y), m + n * draw(1, 9, 2, seed=1), n, centered=False)
    estimate, error = posterior.estimate(m, n / 10)
    assert bool(estimate.isfinite().all())
    assert 0 < float(error) < float(n) / 10
