r"""Pair features that are functions of the distance between two cells, as factors computed from their positions.

.. math::

    p_{ijc} = a_c\, |x_i - x_j|^2 / \rho^2 + b_c\, f(\omega_c |x_i - x_j|), \qquad
    f(z) = J_0(z) \;\; (D = 2), \qquad f(z) = \frac{\sin z}{z} \;\; (D = 3)

with :math:`\rho` the largest distance. A squared distance has rank D + 2. f is a sum of plane waves in K directions
:math:`u_k`, each of rank 2:

.. math::

    |x_i - x_j|^2 &= |x_i|^2 + |x_j|^2 - 2\, x_i \cdot x_j \\
    f(\omega |d|) &= \sum_k \mu_k \cos(\omega\, u_k \cdot d) + O(\varepsilon) \\
    \cos \omega\, u \cdot (x_i - x_j) &= \cos(\omega u \cdot x_i) \cos(\omega u \cdot x_j)
        + \sin(\omega u \cdot x_i) \sin(\omega u \cdot x_j)

The cosine is even, so that half of the directions suffice. In 2D they are equispaced on the half circle; with the order
m = 2K the error is at most :math:`2 |J_m(z)|`. In 3D they are the product rule of n Gauss-Legendre heights and 2n
equispaced angles, exact for polynomials of degree 2n - 1; half of them are :math:`K = n^2` directions, and with m = 2n the
error is about :math:`(2m + 1) |j_m(z)|`. Both vanish faster than any power once m exceeds z. The order is the smallest even
one whose error at the largest z is under :math:`\varepsilon = 10^{-5}`: z + 8 at z = 2, and z + 14 (2D) or z + 16 (3D) at
z = 20.

Channels have different frequencies and share the directions, which suffice for the highest frequency. Low rank represents only
functions that are smooth over the whole slice: K grows like :math:`\omega \rho` in 2D and like its square in 3D. Edge features of
neighbor attention represent short distances.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.special import jv, spherical_jn
from torch import Tensor, nn

from alphastomics.nn.pair.factors import PairFactors, upcast

TOLERANCE = 1e-5


def wave_directions(n_dims: int, reach: float) -> tuple[Tensor, Tensor]:
    """Directions u (K, D) and weights (K,), in double precision, isotropic up to z = ``reach``.

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


class Template(nn.Module):
    """Pair features of positions, invariant to rotations, reflections and shifts.

    Parameters
    ----------
    n_channels
        C.
    n_dims
        D, 2 or 3.
    radius
        Largest distance rho in model units; beyond it, waves are not isotropic.
    highest
        Highest frequency in radians per model unit; that of channel c is (c + 1) / C of it. None: squared distances only, of
        rank D + 2. Waves add 2K ranks: with highest * radius = 2, 6 or 18, 10, 16 or 32 in 2D and 50, 128 or 578 in 3D.

    Raises
    ------
    ValueError
        If D is neither 2 nor 3, the radius is not positive, or the frequency is negative.
    """

    def __init__(self, n_channels: int, n_dims: int, *, radius: float = 6.0, highest: float | None = None) -> None:
        super().__init__()
        if radius <= 0:
            raise ValueError(f"radius={radius} must be positive")
        directions, weights = wave_directions(n_dims, radius * (highest or 0.0))
        self.radius, self.n_dims = radius, n_dims
        self.rank = n_dims + 2
        self.squared = nn.Parameter(torch.randn(n_channels))
        self.wave: nn.Parameter | None = None
        if highest is not None:
            self.rank += 2 * len(directions)
            self.wave = nn.Parameter(torch.randn(n_channels))
            frequencies = highest * torch.arange(1, n_channels + 1, dtype=torch.float64) / n_channels
            self.frequencies: Tensor
            self.directions: Tensor
            self.weights: Tensor
            self.register_buffer("frequencies", frequencies.float(), persistent=False)
            self.register_buffer("directions", directions.float(), persistent=False)
            self.register_buffer("weights", weights.float(), persistent=False)

    def forward(self, position: Tensor, mask: Tensor | None = None) -> PairFactors:
        """Factors from ``position`` x (B, N, D); the ranks of squared distances come first."""
        with torch.autocast(position.device.type, enabled=False):
            x = _centered(upcast(position), mask)
            factors = self._squared_distance(x / self.radius)
            if self.wave is not None:
                factors = factors.add(self._waves(x, self.wave))
        return PairFactors.masked(*factors[:2], mask)

    def _squared_distance(self, x: Tensor) -> PairFactors:
        square, one = x.square().sum(dim=-1, keepdim=True), torch.ones_like(x[..., :1])
        left, right = torch.cat([x, square, one], dim=-1), torch.cat([-2 * x, one, square], dim=-1)
        right = self.squared[:, None, None] * right[:, None]
        return PairFactors(left[:, None].expand_as(right), right)

    def _waves(self, x: Tensor, amplitude: Tensor) -> PairFactors:
        along = x @ self.directions.to(x.dtype).mT  # (B, N, K)
        phase = self.frequencies.to(x.dtype)[:, None, None] * along[:, None]
        left = torch.cat([phase.cos(), phase.sin()], dim=-1)
        return PairFactors(left, amplitude[:, None, None] * self.weights.to(x.dtype).repeat(2) * left)


def _centered(x: Tensor, mask: Tensor | None) -> Tensor:
    """Positions relative to the mean of the real cells, which reduces rounding errors."""
    if mask is None:
        return x - x.mean(dim=1, keepdim=True)
    real = mask[..., None]
    x = x.masked_fill(~real, 0)
    return (x - x.sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True).clamp_min(1)).masked_fill(~real, 0)
