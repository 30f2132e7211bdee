r"""Gaussian posterior of the position of each cell, used once the noise is smaller than about the spacing of cells.

Let :math:`y = z_t/\alpha_t = x_0 + n \varepsilon` be the noisy positions and :math:`n = \sigma_t/\alpha_t` their noise. If
the information that the denoiser has besides y is a Gaussian :math:`\mathcal N(m_i, 1/p)` for every cell i, its estimate and
the error of that estimate are

.. math::

    \hat x(y, n) = \frac{p\, m + y/n^2}{p + 1/n^2}, \qquad r^2 = \frac{1}{p + 1/n^2} .

Tweedie's formula gives the error, :math:`r^2 = n^2 J` with :math:`J = \frac{1}{ND} \operatorname{tr}\,
\partial \hat x/\partial y`, so that one estimate and its derivative determine p and m:

.. math::

    p = \frac{1 - J}{J n^2}, \qquad p\, m = \frac{\hat x / J - y}{n^2} .

The derivative is a finite difference along one random direction (Hutchinson 1990). The estimate at any finer noise then needs
no call of the denoiser, and r is the noise level that the minimum-distance network has to remove.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from alphastomics.diffusion.geometry import center
from alphastomics.nn import nearest_neighbors

if TYPE_CHECKING:
    from collections.abc import Callable

    from alphastomics.nn import MinDistanceNetwork

STEP = 0.3  # step of the finite difference, in units of the noise
MIN_DERIVATIVE = 0.01  # of J, which a finite difference may find to be 0 or less


class GaussianPosterior(NamedTuple):
    """The Gaussian N(m, 1/p) of every cell."""

    precision: Tensor
    """p, ()."""
    weighted_mean: Tensor
    """p m, (1, N, D)."""

    def estimate(self, y: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate (1, N, D) of the clean positions from ``y`` of noise ``n`` (), and its error ()."""
        precision = self.precision + n**-2
        return (self.weighted_mean + y / n**2) / precision, precision**-0.5

    def refined(self, min_distance: MinDistanceNetwork, y: Tensor, n: Tensor, spacing: float) -> Tensor:
        """Estimate (1, N, D) after minimum-distance refinement, which removes the error; ``spacing`` in the units of ``y``."""
        x, error = self.estimate(y, n)
        x = x[0] / spacing
        return min_distance(x, error / spacing, nearest_neighbors(x, min_distance.n_neighbors))[None] * spacing


def estimate_posterior(
    denoise: Callable[[Tensor], Tensor], y: Tensor, n: Tensor, *, centered: bool
) -> GaussianPosterior:
    """Estimate p and p m from two calls of ``denoise`` at positions ``y`` (1, N, D) of noise ``n`` ()."""
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    if centered:
        direction = center(direction)
    x = denoise(y)
    change = denoise(y + STEP * n * direction) - x
    length = direction.square().sum().clamp_min(torch.finfo(y.dtype).eps)  # a single centered cell has no direction
    derivative = ((change * direction).sum() / (STEP * n * length)).clamp(MIN_DERIVATIVE, 1.0)
    return GaussianPosterior(
        precision=(1 - derivative) / (derivative * n**2),
        weighted_mean=(x / derivative - y) / n**2,
    )
