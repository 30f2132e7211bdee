r"""Plane waves of all directions that add up to a function of the distance.

.. math::

    \sum_k \mu_k \cos(\omega\, u_k \cdot d) = f(\omega |d|) + O(\varepsilon), \qquad
    f(z) = J_0(z) \;\; (D = 2), \qquad f(z) = \frac{\sin z}{z} \;\; (D = 3)

The cosine is even, so half of the directions are enough. In 2D K directions :math:`u_k` are equispaced on the half
circle; with the order m = 2K the error is :math:`2 |J_m(z)|` and less. In 3D they are the product rule of n
Gauss-Legendre heights and 2n equispaced angles, exact for polynomials of degree 2n - 1; half of them are
:math:`K = n^2` directions, and with m = 2n the error is about :math:`(2m + 1) |j_m(z)|`. Both vanish faster than any
power once m has passed z. The order is the smallest even one whose error at the largest z is under
:math:`\varepsilon = 10^{-5}`: z + 8 at z = 2, and z + 14 (2D) or z + 16 (3D) at z = 20.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import jv, spherical_jn
from torch import Tensor

TOLERANCE = 1e-5


def wave_directions(n_dims: int, reach: float) -> tuple[Tensor, Tensor]:
    """Directions u (K, D) and weights (K,), in double precision, that are isotropic up to z = ``reach``.

    Raises
    ------
    ValueError
        If D is neither 2 nor 3, or ``reach`` is negative.
    """
    if n_dims not in (2, 3):
        raise ValueError(f"n_dims={n_dims} must be 2 or 3")
    if reach < 0:
        raise ValueError(f"reach={reach} must not be negative")
    half_order = math.ceil((reach + 1) / 2)
    while _error(n_dims, 2 * half_order, reach) > TOLERANCE:
        half_order += 1
    return _half_circle(half_order) if n_dims == 2 else _half_sphere(half_order)


def _error(n_dims: int, order: int, z: float) -> float:
    if n_dims == 2:
        return 2 * abs(float(jv(order, z)))
    return (2 * order + 1) * abs(float(spherical_jn(order, z)))


def _half_circle(n: int) -> tuple[Tensor, Tensor]:
    angle = math.pi * torch.arange(n, dtype=torch.float64) / n
    return torch.stack([angle.cos(), angle.sin()], dim=1), torch.full((n,), 1 / n, dtype=torch.float64)


def _half_sphere(n: int) -> tuple[Tensor, Tensor]:
    """Half of the product rule: angles below pi, at all heights. The opposite of (z, angle) is (-z, angle + pi)."""
    height, weight = (torch.tensor(part) for part in np.polynomial.legendre.leggauss(n))
    angle = math.pi * torch.arange(n, dtype=torch.float64) / n
    radius = (1 - height**2).sqrt()[:, None]
    directions = [radius * angle.cos(), radius * angle.sin(), height[:, None].expand(n, n)]
    return torch.stack(directions, dim=-1).flatten(0, 1), (weight / (2 * n)).repeat_interleave(n)
