"""The process against Bayes' rule, written as products and conditionals of dense Gaussians in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st

from alphastomics.diffusion import CosineSchedule, Process

PREDICTIONS = ["x0", "epsilon", "v"]
SCHEDULES = [CosineSchedule(name=name, nu=nu) for name in ("cosine", "cosine_nd") for nu in (1.0, 2.0)]
times = st.floats(0.02, 0.98)


def gaussians(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, *shape, generator=generator, dtype=torch.float64))


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def levels(schedule: CosineSchedule, t: float) -> tuple[float, float]:
    return float(schedule.alpha(column(t))), float(schedule.sigma(column(t)))


def test_forward_process_is_one_timestep_per_context():
    process = Process()
    x_0, epsilon = gaussians(3, 5, 2)
    t = column(0.0, 0.3, 1.0)
    z = process.noise(x_0, t, epsilon)
    alpha, sigma = levels(process.schedule, 0.3)
    np.testing.assert_allclose(z[1], alpha * x_0[1] + sigma * epsilon[1], rtol=1e-12)
    assert torch.equal(z[0], x_0[0])
    assert torch.equal(z[2], epsilon[2])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_every_parameterisation_inverts_the_forward_process(schedule, prediction):
    process = Process(schedule=schedule, prediction_type=prediction)
    x_0, epsilon = gaussians(4, 6, 3)
    t = column(0.05, 0.3, 0.7, 0.95)
    z = process.noise(x_0, t, epsilon)
    alpha, sigma = process.coefficients(t, z)
    output = {"x0": x_0, "epsilon": epsilon, "v": alpha * epsilon - sigma * x_0}[prediction]
    np.testing.assert_allclose(process.x0(output, z, t), x_0, atol=1e-9)
    np.testing.assert_allclose(process.epsilon(x_0, z, t), epsilon, atol=1e-9)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_both_ends_of_the_chain_are_finite(prediction):
    process = Process(prediction_type=prediction)
    output, z = (x.float() for x in gaussians(2, 6, 3))
    t = torch.tensor([0.0, 1.0])
    x_0 = process.x0(output, z, t)
    assert bool(x_0.isfinite().all())
    assert bool(process.epsilon(x_0, z, t).isfinite().all())
    if prediction != "x0":
        assert torch.equal(x_0[0], z[0])
    np.testing.assert_array_equal(x_0[1], -output[1] if prediction == "v" else output[1])


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_near_pure_noise_the_estimate_stays_bounded(prediction):
    """sigma / alpha is unbounded; a noise estimate that is off by 1e-3 must not throw x0 to infinity."""
    process = Process(prediction_type=prediction)
    x_0, epsilon = (x.float() for x in gaussians(1, 50, 2))
    t = torch.tensor([1 - 1e-7])
    alpha, sigma = process.coefficients(t, x_0)
    z = process.noise(x_0, t, epsilon)
    output = {"x0": x_0, "epsilon": epsilon, "v": alpha * epsilon - sigma * x_0}[prediction]
    assert float(process.x0(output + 1e-3, z, t).abs().max()) < 2.3e4 * 1e-2


@given(t=times, s=times, name=st.sampled_from(["cosine", "cosine_nd"]), nu=st.sampled_from([1.0, 2.0]))
def test_posterior_is_the_product_of_two_gaussians(t, s, name, nu):
    """q(z_s | z_t, x0) is proportional to q(z_t | z_s) q(z_s | x0): precisions add."""
    assume(s < t - 0.01)
    process = Process(schedule=CosineSchedule(name=name, nu=nu))
    x_0, z_t = gaussians(1, 4, 2)
    (alpha_s, sigma_s), (alpha_t, sigma_t) = levels(process.schedule, s), levels(process.schedule, t)
    a = alpha_t / alpha_s
    step = sigma_t**2 - a**2 * sigma_s**2  # q(z_t | z_s) = N(a z_s, step)
    variance = 1 / (a**2 / step + 1 / sigma_s**2)
    mean = variance * (a * z_t / step + alpha_s * x_0 / sigma_s**2)
    actual_mean, actual_variance = process.posterior(z_t, x_0, column(t), column(s))
    np.testing.assert_allclose(actual_mean, mean, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(actual_variance, np.full((1, 1, 1), variance), rtol=1e-7)


def conditional(schedule: CosineSchedule, t: float, s: float, m: float, v: float) -> tuple[float, float, float]:
    """Slope, offset and variance of z_s given z_t for x0 ~ N(m, v), from the dense joint covariance."""
    (alpha_s, sigma_s), (alpha_t, sigma_t) = levels(schedule, s), levels(schedule, t)
    a = alpha_t / alpha_s
    var_s = alpha_s**2 * v + sigma_s**2
    joint = np.array([[var_s, a * var_s], [a * var_s, alpha_t**2 * v + sigma_t**2]])
    slope = joint[0, 1] / joint[1, 1]
    return slope, alpha_s * m - slope * alpha_t * m, joint[0, 0] - slope * joint[0, 1]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("t", "s"), [(1.0, 0.97), (0.9, 0.5), (0.3, 0.29), (0.1, 0.02)])
def test_posterior_of_gaussian_data_is_bayes_rule(schedule, t, s):
    """Averaged over x0 given z_t, the posterior must be the conditional of the joint Gaussian of z_s and z_t."""
    m, v = 0.7, 0.4
    process = Process(schedule=schedule)
    slope, offset, variance = conditional(schedule, t, s, m, v)
    alpha, sigma = levels(schedule, t)
    total = alpha**2 * v + sigma**2
    z = torch.linspace(-2, 2, 5, dtype=torch.float64).reshape(1, 5, 1)
    expected_x0 = m + alpha * v / total * (z - alpha * m)
    mean, within = process.posterior(z, expected_x0, column(t), column(s))
    weight = process.posterior(torch.zeros_like(z), torch.ones_like(z), column(t), column(s))[0][0, 0, 0]
    np.testing.assert_allclose(mean, slope * z + offset, atol=1e-9)
    assert float(within + weight**2 * v * sigma**2 / total) == pytest.approx(variance, rel=1e-7)


@given(t=times, s=times)
def test_posterior_leads_from_one_marginal_to_the_other(t, s):
    assume(s < t)
    process = Process()
    x_0, z = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64)
    (alpha_s, sigma_s), (alpha_t, sigma_t) = levels(process.schedule, s), levels(process.schedule, t)
    of_x0, variance = process.posterior(z, x_0, column(t), column(s))
    of_z = process.posterior(x_0, z, column(t), column(s))[0]
    assert float(of_z * alpha_t + of_x0) == pytest.approx(alpha_s, rel=1e-9)
    assert float(of_z**2 * sigma_t**2 + variance) == pytest.approx(sigma_s**2, rel=1e-9)


def test_single_precision_posterior_of_a_thousand_steps_matches_double():
    process = Process(schedule=CosineSchedule(nu=2.0))
    times = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    t, s = times[:-1], times[1:]
    z, x_0 = gaussians(len(t), 1, 1)
    mean, variance = process.posterior(z.float(), x_0.float(), t.float(), s.float())
    exact_mean, exact_variance = process.posterior(z, x_0, t, s)
    np.testing.assert_allclose(mean, exact_mean, atol=2e-3)
    np.testing.assert_allclose(variance.sqrt(), exact_variance.sqrt(), rtol=1e-2)


def test_loss_weight_turns_the_error_of_x0_into_that_of_v():
    process = Process(prediction_type="v")
    v, other = gaussians(3, 5, 2)
    z, t = torch.ones_like(v), column(0.2, 0.5, 1.0)
    error = (process.x0(v, z, t) - process.x0(other, z, t)) ** 2
    weight = process.loss_weight(t, maximum=1e9)
    np.testing.assert_allclose(error * weight[:, None, None], (v - other) ** 2, rtol=1e-9)


def test_loss_weight_has_a_ceiling_that_also_holds_without_noise():
    process = Process()
    t = torch.tensor([0.0, 1e-4, 0.5, 1.0])
    weight = process.loss_weight(t, maximum=25.0)
    assert weight[:2].tolist() == [25.0, 25.0]
    assert float(weight[2]) == pytest.approx(1 / float(process.schedule.sigma(t[2])) ** 2)
    assert float(weight[3]) == 1


def test_unknown_prediction_raises():
    with pytest.raises(ValueError, match="prediction_type='score'"):
        Process(prediction_type="score")
