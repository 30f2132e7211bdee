"""Reverse chains for data whose exact denoiser is known.

For Gaussian data every step is affine in z and in the noise, so that the law of a sample is computed exactly, without
Monte Carlo: the coefficient of each noise draw is read off by feeding the chain one unit of that noise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from scipy.integrate import solve_ivp

from alphastomics.diffusion import CosineSchedule, Process, Start, make_step, run_sampler, time_grid

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SCHEDULES = [CosineSchedule(name=name, nu=nu) for name in ("cosine", "cosine_nd") for nu in (1.0, 2.0)]
SAMPLERS = ["ddpm", "ddim", "dpm++2m"]


def gaussian_denoiser(process: Process, mean: float, sd: float) -> Callable[[Tensor, Tensor], Tensor]:
    """E[x0 | z_t] of x0 ~ N(mean, sd^2)."""

    def denoise(z: Tensor, t: Tensor) -> Tensor:
        alpha, sigma = process.coefficients(t, z)
        return mean + alpha * sd**2 / (alpha**2 * sd**2 + sigma**2) * (z - alpha * mean)

    return denoise


def law(process: Process, name: str, n_steps: int, *, mean: float, sd: float, eta: float = 0.0) -> tuple[float, float]:
    """Exact mean and variance of the samples of a chain on N(mean, sd^2)."""
    coefficient = noise_coefficients(process, name, n_steps, mean=mean, sd=sd, eta=eta)
    return float(coefficient[-1]), float(((coefficient[:-1] - coefficient[-1]) ** 2).sum())


def noise_coefficients(process: Process, name: str, n_steps: int, *, mean: float, sd: float, eta: float) -> Tensor:
    """Result of the chain for one unit of the k-th noise alone, (n_steps + 1,); the last without any noise."""
    draws = iter(range(n_steps))

    def noise() -> Tensor:
        unit = torch.zeros(n_steps + 1, 1, 1, dtype=torch.float64)
        unit[next(draws)] = 1
        return unit

    step = make_step(name, process, eta=eta)
    return run_sampler(gaussian_denoiser(process, mean, sd), step, noise, n_steps=n_steps).flatten()


@pytest.mark.parametrize("schedule", SCHEDULES[1:3])
@pytest.mark.parametrize("sd", [0.2, 2.0])
@pytest.mark.parametrize(("name", "tolerance"), [("ddpm", 0.07), ("ddim", 0.03), ("dpm++2m", 0.005)])
def test_many_steps_reproduce_mean_and_variance(schedule, sd, name, tolerance):
    mean, variance = law(Process(schedule=schedule), name, 400, mean=0.7, sd=sd)
    assert mean == pytest.approx(0.7, abs=0.02)
    assert variance == pytest.approx(sd**2, rel=tolerance)


@pytest.mark.parametrize("sd", [0.2, 2.0])
@pytest.mark.parametrize("t", [0.3, 0.7])
@pytest.mark.parametrize(("name", "tolerance"), [("ddpm", 0.07), ("ddim", 0.03), ("dpm++2m", 0.005)])
def test_samples_that_start_from_data_have_their_mean_and_variance(sd, t, name, tolerance):
    """The result is affine in x_0 ~ N(0.7, sd^2) and in the noise; each row is one unit of one of them."""
    process, n_steps = Process(), 400
    unit = torch.eye(n_steps + 2, dtype=torch.float64)[:, :-1, None, None]  # the last row is the offset
    draws = iter(unit[:, 1:].unbind(1))
    x = run_sampler(
        gaussian_denoiser(process, 0.7, sd),
        make_step(name, process),
        lambda: next(draws),
        n_steps=n_steps,
        start=Start(unit[:, 0], t),
    ).flatten()
    slope = x[:-1] - x[-1]
    assert float(x[-1] + 0.7 * slope[0]) == pytest.approx(0.7, abs=0.02)
    assert float(slope[0].square() * sd**2 + slope[1:].square().sum()) == pytest.approx(sd**2, rel=tolerance)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_start_at_the_last_time_is_pure_noise(name):
    def run(start: Start | None) -> Tensor:
        process, generator = Process(), torch.Generator().manual_seed(0)
        noise = lambda: torch.randn(2, 5, 3, generator=generator)
        return run_sampler(
            gaussian_denoiser(process, 0.7, 0.5), make_step(name, process), noise, n_steps=7, start=start
        )

    assert torch.equal(run(Start(torch.full((2, 5, 3), 9.0), 1.0)), run(None))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_start_at_a_small_time_is_hardly_changed(name):
    process, generator, t = Process(), torch.Generator().manual_seed(0), 0.01
    x_0 = 1 + torch.randn(2, 5, 3, generator=generator)
    noise = lambda: torch.randn(2, 5, 3, generator=generator)
    x = run_sampler(
        gaussian_denoiser(process, 0.7, 2.0), make_step(name, process), noise, n_steps=7, start=Start(x_0, t)
    )
    assert 0 < float((x - x_0).abs().max()) < 5 * float(process.schedule.sigma(torch.tensor(t)))


def test_the_law_matches_drawn_samples():
    """The exact law above, checked once against plain sampling."""
    process, generator = Process(), torch.Generator().manual_seed(0)
    x = run_sampler(
        gaussian_denoiser(process, 0.7, 0.5),
        make_step("ddpm", process),
        lambda: torch.randn(1, 20_000, 1, generator=generator),
        n_steps=20,
    )
    mean, variance = law(process, "ddpm", 20, mean=0.7, sd=0.5)
    assert float(x.mean()) == pytest.approx(mean, abs=4 * (variance / 20_000) ** 0.5)
    assert float(x.var()) == pytest.approx(variance, rel=0.04)


@pytest.mark.parametrize("n_steps", [2, 7, 30])
def test_ddim_with_full_noise_is_ddpm(n_steps):
    process = Process()
    assert law(process, "ddim", n_steps, mean=0.7, sd=0.5, eta=1.0) == pytest.approx(
        law(process, "ddpm", n_steps, mean=0.7, sd=0.5), rel=1e-6
    )
    ddim = noise_coefficients(process, "ddim", n_steps, mean=0.7, sd=0.5, eta=1.0)
    np.testing.assert_allclose(ddim, noise_coefficients(process, "ddpm", n_steps, mean=0.7, sd=0.5, eta=0.0), atol=1e-6)


def test_eta_leads_from_no_noise_to_full_noise():
    process = Process()
    shares = []
    for eta in (0.0, 0.5, 1.0):
        coefficient = noise_coefficients(process, "ddim", 10, mean=0.0, sd=1.0, eta=eta)
        shares.append(float((coefficient[1:-1] ** 2).sum() / (coefficient[:-1] ** 2).sum()))
    assert shares[0] == 0
    assert 0.05 < shares[1] < shares[2] - 0.05


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_the_noise_of_a_ddim_step_matches_the_formula(eta):
    process, unit = Process(), torch.ones(1, 1, 1, dtype=torch.float64)
    t, s = torch.tensor([0.7], dtype=torch.float64), torch.tensor([0.4], dtype=torch.float64)
    step, zero = make_step("ddim", process, eta=eta), torch.zeros_like(unit)
    sigma_t, sigma_s = float(process.schedule.sigma(t)), float(process.schedule.sigma(s))
    variance = float(process.posterior(zero, zero, t, s)[1])
    assert float(step(zero, zero, t, s, None, lambda: unit)) == pytest.approx(eta * variance**0.5)
    kept = float(step(sigma_t * unit, zero, t, s, None, lambda: zero))  # a z_t whose noise is one
    assert kept**2 + eta**2 * variance == pytest.approx(sigma_s**2)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("n_steps", [1, 2, 13])
@pytest.mark.parametrize("start", [None, Start(torch.zeros(2, 3, 2), 0.7)])
def test_the_denoiser_is_called_exactly_n_times(name, n_steps, start):
    calls: list[float] = []
    ticks: list[None] = []

    def denoise(z: Tensor, t: Tensor) -> Tensor:
        assert t.shape == (len(z),)
        calls.append(float(t[0]))
        return 0.5 * z

    run_sampler(
        denoise,
        make_step(name, Process()),
        lambda: torch.ones(2, 3, 2),
        n_steps=n_steps,
        start=start,
        on_step=lambda: ticks.append(None),
    )
    np.testing.assert_allclose(calls, (start.t if start else 1.0) * time_grid(n_steps)[:-1], rtol=1e-6)
    assert len(ticks) == n_steps


@pytest.mark.parametrize("name", SAMPLERS)
def test_one_step_returns_the_conditional_mean(name):
    process = Process()
    z = torch.randn(2, 5, 3)
    x = run_sampler(gaussian_denoiser(process, 0.7, 0.5), make_step(name, process), lambda: z, n_steps=1)
    torch.testing.assert_close(x, torch.full_like(z, 0.7))


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_last_step_returns_the_estimate_itself(name):
    estimates: list[Tensor] = []

    def denoise(z: Tensor, t: Tensor) -> Tensor:
        estimates.append(torch.tanh(z))
        return estimates[-1]

    x = run_sampler(denoise, make_step(name, Process()), lambda: torch.ones(1, 3, 2), n_steps=5)
    assert torch.equal(x, estimates[-1])


@given(n_steps=st.integers(1, 2000))
@example(n_steps=999)
@example(n_steps=10_000)
def test_no_number_of_steps_is_rounded(n_steps):
    times = time_grid(n_steps)
    assert len(times) == n_steps + 1
    assert (float(times[0]), float(times[-1])) == (1.0, 0.0)
    assert bool((times.diff() < 0).all())
    np.testing.assert_allclose(times ** (2 / 3), np.linspace(1, 0, n_steps + 1), atol=1e-6)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_of_a_long_chain_in_single_precision_are_those_in_double(name, schedule):
    """All ten thousand steps at once: noise that rounds to zero, and a division by it, would show."""
    times = time_grid(10_000)
    generator = torch.Generator().manual_seed(0)
    z, x_0, x_before, xi = torch.randn(4, len(times), 1, 1, generator=generator, dtype=torch.float64)
    results = []
    for dtype in (torch.float32, torch.float64):
        u = times.to(dtype)
        before = (u[:-3], x_before[1:-2].to(dtype))
        step = make_step(name, Process(schedule=schedule), eta=0.5)
        t, s = u[1:-2], u[2:-1]
        results.append(
            step(z[1:-2].to(dtype), x_0[1:-2].to(dtype), t, s, before, lambda noise=xi[1:-2].to(dtype): noise)
        )
    np.testing.assert_allclose(results[0], results[1], atol=2e-2)


@pytest.mark.parametrize("n_steps", [0, -3])
def test_no_steps_raise(n_steps):
    with pytest.raises(ValueError, match="n_steps"):
        time_grid(n_steps)


@pytest.mark.parametrize("start", [0.0, -0.1, 1.1, float("nan")])
def test_a_start_outside_of_the_times_raises(start):
    with pytest.raises(ValueError, match="start"):
        time_grid(3, start)


def test_unknown_sampler_raises():
    with pytest.raises(ValueError, match="sampler='euler'"):
        make_step("euler", Process())


def mixture_denoiser(alpha: np.ndarray, sigma: np.ndarray, z: np.ndarray, *, sd: float = 0.4) -> np.ndarray:
    """E[x0 | z] for an even mixture of N(-1, sd^2) and N(1, sd^2): the means of the two parts, weighted by evidence."""
    total = alpha**2 * sd**2 + sigma**2
    part = [m + alpha * sd**2 / total * (z - alpha * m) for m in (-1.0, 1.0)]
    right = 1 / (1 + np.exp(-2 * alpha * z / total))
    return (1 - right) * part[0] + right * part[1]


def mixture_estimate(process: Process, z: Tensor, t: Tensor) -> Tensor:
    alpha, sigma = (x.numpy() for x in process.coefficients(t, z))
    return torch.from_numpy(mixture_denoiser(alpha, sigma, z.numpy()))


def transported(z: np.ndarray, end: float = 1e-6) -> np.ndarray:
    """Solution of the probability-flow equation dz/dtheta = v, alpha = cos(theta), from pure noise to theta = ``end``."""

    def v(theta: float, z: np.ndarray) -> np.ndarray:
        alpha, sigma = np.cos(theta), np.sin(theta)
        x_0 = mixture_denoiser(alpha, sigma, z)
        return alpha * (z - alpha * x_0) / sigma - sigma * x_0

    return solve_ivp(v, (np.pi / 2, end), z, method="DOP853", rtol=1e-9, atol=1e-9).y[:, -1]


def mixture_error(name: str, n_steps: int, schedule: CosineSchedule) -> float:
    """Root mean square distance of the chain's end from the exact solution, over starting points."""
    process = Process(schedule=schedule)
    z = np.linspace(-2.5, 2.5, 42)

    x = run_sampler(
        lambda z_t, t: mixture_estimate(process, z_t, t),
        make_step(name, process),
        lambda: torch.from_numpy(z)[None, :, None],
        n_steps=n_steps,
    )
    return float(np.sqrt(np.mean((x.numpy().ravel() - transported(z)) ** 2)))


def stretch_error(name: str, n_steps: int) -> float:
    """The same between t = 0.9 and t = 0.1, started on the exact path: the ends of the chain have errors of their own."""
    process = Process(schedule=CosineSchedule(nu=1.0))
    times = torch.linspace(0.9, 0.1, n_steps + 1, dtype=torch.float64)
    angles = np.arccos(process.schedule.alpha(times[[0, -1]]).numpy())
    start, exact = (transported(np.linspace(-2.5, 2.5, 42), angle) for angle in angles)
    z, before = torch.from_numpy(start)[None, :, None], None
    for t, s in zip(times[:-1, None], times[1:, None], strict=True):
        x_0 = mixture_estimate(process, z, t)
        z, before = make_step(name, process)(z, x_0, t, s, before, lambda: torch.zeros(())), (t, x_0)
    return float(np.sqrt(np.mean((z.numpy().ravel() - exact) ** 2)))


def test_second_order_solver_converges_with_second_order():
    errors = {name: np.array([stretch_error(name, n) for n in (20, 40, 80)]) for name in ("ddim", "dpm++2m")}
    order = {name: np.log2(e[:-1] / e[1:]) for name, e in errors.items()}
    np.testing.assert_allclose(order["dpm++2m"], 2, atol=0.3)
    np.testing.assert_allclose(order["ddim"], 1, atol=0.3)
    assert errors["dpm++2m"][-1] < 0.1 * errors["ddim"][-1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_second_order_solver_beats_the_first_at_ten_steps(schedule):
    assert mixture_error("dpm++2m", 10, schedule) < 0.7 * mixture_error("ddim", 10, schedule)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_have_the_precision_of_the_noise_and_no_gradient(name, dtype):
    process = Process()
    weight = torch.ones((), dtype=dtype, requires_grad=True)
    x = run_sampler(
        lambda z, t: weight * z, make_step(name, process), lambda: torch.ones(2, 3, 2, dtype=dtype), n_steps=3
    )
    assert x.dtype == dtype
    assert not x.requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_on_a_gpu_match_the_cpu(name):
    def run(device: str) -> Tensor:
        process, generator = Process(), torch.Generator().manual_seed(0)
        noise = lambda: torch.randn(2, 7, 2, generator=generator).to(device)
        return run_sampler(gaussian_denoiser(process, 0.7, 0.5), make_step(name, process), noise, n_steps=9)

    assert run("cuda").is_cuda
    torch.testing.assert_close(run("cuda").cpu(), run("cpu"), atol=1e-5, rtol=1e-5)
