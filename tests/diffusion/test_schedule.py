"""The schedule against its formula in float64, its ends, and its inverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from alphastomics.diffusion import CosineSchedule

NAMES = ["cosine", "cosine_nd"]
names = pytest.mark.parametrize("name", NAMES)
exponents = pytest.mark.parametrize("nu", [0.5, 1.0, 2.0])


def dense_alpha(name: str, u: np.ndarray, nu: float, s: float = 0.008) -> np.ndarray:
    def f(x: np.ndarray) -> np.ndarray:
        return np.cos(0.5 * np.pi * (x**nu + s) / (1 + s)) ** 2

    ratio = f(u) / f(np.zeros(()))
    return ratio if name == "cosine" else np.sqrt(ratio)


@names
@exponents
def test_signal_and_noise_match_the_formula(name, nu):
    u = np.linspace(0, 1, 101)[1:-1]
    schedule = CosineSchedule(name=name, nu=nu)
    alpha = dense_alpha(name, u, nu)
    time = torch.from_numpy(u)
    np.testing.assert_allclose(schedule.alpha(time), alpha, rtol=1e-12)
    np.testing.assert_allclose(schedule.sigma(time), np.sqrt(1 - alpha**2), rtol=1e-9)
    np.testing.assert_allclose(schedule.alpha(time.float()), alpha, atol=3e-7)


@pytest.mark.parametrize(("name", "sigma"), [("cosine", 0.870), ("cosine_nd", 0.711)])
def test_the_noise_in_the_middle_differs_between_the_conventions(name, sigma):
    assert float(CosineSchedule(name=name).sigma(torch.tensor(0.5))) == pytest.approx(sigma, abs=5e-4)


def test_signal_of_one_convention_is_the_square_of_the_other():
    u = torch.linspace(0, 1, 33, dtype=torch.float64)
    torch.testing.assert_close(CosineSchedule(name="cosine").alpha(u), CosineSchedule(name="cosine_nd").alpha(u) ** 2)


@names
@exponents
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_are_exact(name, nu, dtype):
    schedule = CosineSchedule(name=name, nu=nu)
    ends = torch.tensor([0.0, 1.0], dtype=dtype)
    assert schedule.alpha(ends).tolist() == [1.0, 0.0]
    assert schedule.sigma(ends).tolist() == [0.0, 1.0]
    assert schedule.alpha(ends).dtype == dtype


@given(u=st.floats(0, 1), nu=st.floats(0.3, 4), name=st.sampled_from(NAMES))
def test_variance_is_preserved_and_nothing_is_negative(u, nu, name):
    schedule = CosineSchedule(name=name, nu=nu)
    time = torch.tensor([u], dtype=torch.float32)
    alpha, sigma = schedule.alpha(time), schedule.sigma(time)
    assert float(alpha**2 + sigma**2) == pytest.approx(1, abs=1e-6)
    assert 0 <= float(alpha) <= 1
    assert 0 <= float(sigma) <= 1


@names
def test_small_noise_keeps_its_digits_in_single_precision(name):
    """1 - alpha^2 would lose them all: with nu = 2 the noise of the first thousandth is below 2e-4."""
    schedule = CosineSchedule(name=name, nu=2.0)
    u = torch.tensor([1e-4, 1e-3, 1e-2], dtype=torch.float32)
    a_0, a = 0.5 * np.pi * 0.008 / 1.008, 0.5 * np.pi * (u.double().numpy() ** 2 + 0.008) / 1.008
    exact = np.sin(a - a_0) * np.sin(a + a_0) / np.cos(a_0) ** 2
    exact = np.sqrt(exact if name == "cosine_nd" else exact * (2 - exact))
    np.testing.assert_allclose(schedule.sigma(u), exact, rtol=1e-4)


@names
def test_noise_grows_and_signal_falls(name):
    schedule = CosineSchedule(name=name)
    u = torch.linspace(0, 1, 1001, dtype=torch.float64)
    assert bool((schedule.alpha(u).diff() < 0).all())
    assert bool((schedule.sigma(u).diff() > 0).all())
    assert bool((schedule.log_snr(u).diff() <= 0).all())


@names
def test_log_signal_to_noise_is_clamped_where_it_is_infinite(name):
    schedule = CosineSchedule(name=name)
    assert schedule.log_snr(torch.tensor([0.0, 1.0])).tolist() == [10.0, -10.0]
    u = np.linspace(0, 1, 65)[1:-1]
    alpha = dense_alpha(name, u, 1.0)
    expected = np.log(alpha / np.sqrt(1 - alpha**2))
    assert np.abs(expected).max() < 10
    np.testing.assert_allclose(schedule.log_snr(torch.from_numpy(u)), expected, atol=1e-9)
    np.testing.assert_allclose(schedule.log_snr(torch.from_numpy(u).float()), expected, atol=1e-4)


@pytest.mark.parametrize("bad", [{"name": "linear"}, {"nu": 0.0}, {"s": -0.1}])
def test_invalid_arguments_raise(bad):
    with pytest.raises(ValueError, match="|".join(bad) + "|schedule"):
        CosineSchedule(**bad)
