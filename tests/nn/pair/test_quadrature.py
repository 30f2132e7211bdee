"""Sums of plane waves against Bessel functions, and the product rule against polynomials."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import j0, jv, spherical_jn

from alphastomics.nn.pair import wave_directions

dimensions = pytest.mark.parametrize("n_dims", [2, 3])
PROFILE = {2: j0, 3: lambda z: np.sinc(z / np.pi)}


def unit_vectors(n: int, n_dims: int) -> torch.Tensor:
    x = torch.randn(n, n_dims, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True)


@dimensions
@pytest.mark.parametrize("reach", [0.0, 3.0, 17.7])
def test_waves_add_up_to_a_function_of_the_distance(n_dims, reach):
    """Bar: 1e-4."""
    u, weight = wave_directions(n_dims, reach)
    z = torch.linspace(0, reach, 40, dtype=torch.float64)
    waves = (z[:, None, None] * (unit_vectors(200, n_dims) @ u.mT)).cos() @ weight
    expected = PROFILE[n_dims](z.numpy())[:, None]
    assert np.abs(waves.numpy() - expected).max() <= 1e-4
    too_far = ((reach + 10) * 2 * (unit_vectors(200, n_dims) @ u.mT)).cos() @ weight
    assert float(too_far.std()) > 1e-2  # the rule is needed


@dimensions
@pytest.mark.parametrize(("reach", "orders"), [(0.0, (2, 2)), (2.0, (10, 10)), (6.0, (16, 16)), (18.0, (32, 34))])
def test_the_order_is_the_smallest_that_suffices(n_dims, reach, orders):
    order = orders[n_dims - 2]
    u, weight = wave_directions(n_dims, reach)
    assert len(u) == len(weight) == (order // 2 if n_dims == 2 else (order // 2) ** 2)
    np.testing.assert_allclose(u.norm(dim=1), 1)
    np.testing.assert_allclose(weight.sum(), 1)
    error = lambda m: 2 * abs(jv(m, reach)) if n_dims == 2 else (2 * m + 1) * abs(spherical_jn(m, reach))
    assert error(order) <= 1e-5
    assert error(order - 2) > 1e-5


def test_the_rule_on_the_sphere_is_exact_for_polynomials():
    """Mean of x^a y^b z^c over the sphere, even degrees: half of the sphere sees no others."""
    u, weight = (part.numpy() for part in wave_directions(3, 2.0))  # 5 heights, degree 9
    odd = lambda k: math.prod(range(k - 1, 0, -2))  # (k - 1)!!
    for degree in (0, 2, 4, 6, 8):
        for a in range(degree + 1):
            for b in range(degree + 1 - a):
                powers = (a, b, degree - a - b)
                even = all(power % 2 == 0 for power in powers)
                mean = math.prod(map(odd, powers)) / math.prod(range(degree + 1, 0, -2)) if even else 0.0
                np.testing.assert_allclose(weight @ np.prod(u**powers, axis=1), mean, atol=1e-14)


@pytest.mark.parametrize(("arguments", "message"), [((4, 1.0), "n_dims=4"), ((2, -1.0), "reach=-1.0")])
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        wave_directions(*arguments)
