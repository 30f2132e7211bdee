r"""What the denoiser knows of each cell, kept as a Gaussian where the noise is as fine as the cells are spaced.

Let :math:`y = z_t/\alpha_t = x_0 + n \varepsilon` be the noisy positions and :math:`n = \sigma_t/\alpha_t` their noise. If
what the denoiser knows besides y is a Gaussian :math:`\mathcal N(m_i, 1/p)` for every cell i, its estimate and the error
that it leaves are

.. math::

    \hat x(y, n) = \frac{p\, m + y/n^2}{p + 1/n^2}, \qquad r^2 = \frac{1}{p + 1/n^2} .

Tweedie's formula gives the error, :math:`r^2 = n^2 J` with :math:`J = \frac{1}{ND} \operatorname{tr}\,
\partial \hat x/\partial y`, so that one estimate and its derivative give p and m:

.. math::

    p = \frac{1 - J}{J n^2}, \qquad p\, m = \frac{\hat x / J - y}{n^2} .

The derivative is a finite difference along one random direction (Hutchinson 1990). The estimate at any finer noise then
costs nothing, and its error is what packing has to remove: it is the noise that packing is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from alphastomics.diffusion.geometry import centre
from alphastomics.nn import nearest_neighbours

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.nn import PackingNetwork

PROBE = 0.3  # step of the finite difference, in units of the noise
LOWEST = 0.01  # of J


class Belief(NamedTuple):
    """The Gaussian N(m, 1/p) of every cell."""

    precision: Tensor
    """p, ()."""
    weighted_mean: Tensor
    """p m, (1, N, D)."""

    def estimate(self, y: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate (1, N, D) of the clean positions from ``y`` of noise ``n`` (), and the error () that is left."""
        precision = self.precision + n**-2
        return (self.weighted_mean + y / n**2) / precision, precision**-0.5

    def packed(self, packing: PackingNetwork, y: Tensor, n: Tensor, spacing: float) -> Tensor:
        """Estimate (1, N, D) after packing, which removes what is left of the error; ``spacing`` as of ``y``."""
        x, error = self.estimate(y, n)
        x = x[0] / spacing
        return packing(x, error / spacing, nearest_neighbours(x, packing.n_neighbours))[None] * spacing


def believe(denoise: Callable[[Tensor], Tensor], y: Tensor, n: Tensor, *, centred: bool) -> Belief:
    """What a denoiser knows besides the noisy positions.

    Parameters
    ----------
    denoise
        Estimate (1, N, D) of the clean positions from noisy ones of noise ``n``; called twice.
    y
        Noisy positions (1, N, D).
    n
        Their noise, ().
    centred
        Whether positions have zero mean.
    """
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    if centred:
        direction = centre(direction)
    x = denoise(y)
    change = denoise(y + PROBE * n * direction) - x
    length = direction.square().sum().clamp_min(torch.finfo(y.dtype).eps)  # a single centred cell has no direction
    derivative = ((change * direction).sum() / (PROBE * n * length)).clamp(LOWEST, 1.0)
    return Belief(
        precision=(1 - derivative) / (derivative * n**2),
        weighted_mean=(x / derivative - y) / n**2,
    )
