r"""Features of the distance of two cells, from their positions, as exact factors.

.. math::

    p_{ijc} = a_c\, |x_i - x_j|^2 / \rho^2 + b_c\, f(\omega_c |x_i - x_j|)

with f as in :mod:`alphastomics.nn.pair.quadrature` and :math:`\rho` the largest distance to be told. A squared distance
has rank D + 2, and a plane wave rank 2:

.. math::

    |x_i - x_j|^2 &= |x_i|^2 + |x_j|^2 - 2\, x_i \cdot x_j \\
    \cos \omega\, u \cdot (x_i - x_j) &= \cos(\omega u \cdot x_i) \cos(\omega u \cdot x_j)
        + \sin(\omega u \cdot x_i) \sin(\omega u \cdot x_j)

All channels share K directions, which suffice for the highest frequency; each has a frequency of its own. Low rank
carries what is smooth over the whole field and no more: K grows like :math:`\omega \rho` in 2D and like its square in
3D. Short distances belong to the edges between neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alphastomics.nn.pair.factors import PairFactors, upcast
from alphastomics.nn.pair.quadrature import wave_directions


class Template(nn.Module):
    """Positions to pair features that no rotation, reflection or shift changes.

    Parameters
    ----------
    n_channels
        C.
    n_dims
        D, 2 or 3.
    radius
        The largest distance rho in model units. Beyond it, waves lose their isotropy and nothing else.
    highest
        The highest frequency in radians per model unit; channel c has the share (c + 1) / C of it. None: squared
        distances alone, of rank D + 2. Waves add 2K: with highest * radius = 2, 6 or 18 these are 10, 16 or 32 in 2D,
        and 50, 128 or 578 in 3D.

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
        """``position`` x (B, N, D) to factors; squared distances come first in the rank."""
        with torch.autocast(position.device.type, enabled=False):
            x = _centred(upcast(position), mask)
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


def _centred(x: Tensor, mask: Tensor | None) -> Tensor:
    """Positions about the mean of the real cells: nothing else depends on the shift, but rounding does."""
    if mask is None:
        return x - x.mean(dim=1, keepdim=True)
    real = mask[..., None]
    x = x.masked_fill(~real, 0)
    return (x - x.sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True).clamp_min(1)).masked_fill(~real, 0)
