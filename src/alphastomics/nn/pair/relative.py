r"""Pair features that are functions of the relative position of two cells, in space or in an order, as factors.

**Template**: squared distances, of rank D + 2, exact and invariant to rotations, reflections and shifts,

.. math:: p_{ijc} = a_c\, |x_i - x_j|^2 / \rho^2, \qquad |x_i - x_j|^2 = |x_i|^2 + |x_j|^2 - 2\, x_i \cdot x_j

with :math:`\rho` about the diameter of a slice. Low rank represents only functions that are smooth over the whole slice; edge
features of neighbor attention represent short distances.

**Relative position** in an order: functions of differences of the index s,

.. math::

    p_{ijc} = \sum_{m=1}^{M} a_{cm} \cos \omega_m (s_i - s_j) + b_{cm} \sin \omega_m (s_i - s_j) .

The coefficients a determine the even part of the function, b the odd part. By the addition theorem it has factors of rank 2M,

.. math::

    L_{icm} = [\cos \omega_m s_i,\; \sin \omega_m s_i], \qquad
    R_{jcm} = [a_{cm} \cos \omega_m s_j - b_{cm} \sin \omega_m s_j,\; a_{cm} \sin \omega_m s_j + b_{cm} \cos \omega_m s_j] .

Indices are real numbers of any size, such as those of serial sections or residues, and a common shift has no effect.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from alphastomics.nn.pair.factors import PairFactors, upcast

RADIUS = 6.0  # rho, in model units
# Longest and shortest wavelength in units of the index; at integers a wavelength under 2 equals a longer one.
WAVELENGTHS = 1024.0, 2.0


class Template(nn.Module):
    """Pair features of positions: multiples of squared distances.

    Parameters
    ----------
    n_channels
        C.
    n_dims
        D.
    """

    def __init__(self, n_channels: int, n_dims: int) -> None:
        super().__init__()
        self.rank = n_dims + 2
        self.squared = nn.Parameter(torch.randn(n_channels))

    def forward(self, position: Tensor, mask: Tensor | None = None) -> PairFactors:
        """Factors of rank D + 2 from ``position`` x (B, N, D)."""
        with torch.autocast(position.device.type, enabled=False):
            x = _centered(upcast(position), mask) / RADIUS
            square, one = x.square().sum(dim=-1, keepdim=True), torch.ones_like(x[..., :1])
            left, right = torch.cat([x, square, one], dim=-1), torch.cat([-2 * x, one, square], dim=-1)
            right = self.squared[:, None, None] * right[:, None]
        return PairFactors.masked(left[:, None].expand_as(right), right, mask)


def _centered(x: Tensor, mask: Tensor | None) -> Tensor:
    """Positions relative to the mean of the real cells, which reduces rounding errors."""
    if mask is None:
        return x - x.mean(dim=1, keepdim=True)
    real = mask[..., None]
    x = x.masked_fill(~real, 0)
    return (x - x.sum(dim=1, keepdim=True) / real.sum(dim=1, keepdim=True).clamp_min(1)).masked_fill(~real, 0)


class RelativePosition(nn.Module):
    """Pair features that depend on differences of the indices of cells in an order.

    Parameters
    ----------
    n_channels
        C.
    n_frequencies
        M. For differences clipped to 32 among 300 cells, the coefficient of determination is 0.97 with 8 and 0.998 with 16.
    """

    def __init__(self, n_channels: int, n_frequencies: int) -> None:
        super().__init__()
        self.rank = 2 * n_frequencies
        first, last = (math.log10(wavelength) for wavelength in WAVELENGTHS)
        wavelength = torch.logspace(first, last, n_frequencies, dtype=torch.float64)
        self.frequencies: Tensor
        self.register_buffer("frequencies", (2 * math.pi / wavelength).float(), persistent=False)
        spread = n_frequencies**-0.5
        self.even = nn.Parameter(spread * torch.randn(n_channels, n_frequencies))
        self.odd = nn.Parameter(spread * torch.randn(n_channels, n_frequencies))

    def forward(self, index: Tensor, mask: Tensor | None = None) -> PairFactors:
        """Factors of rank 2M from ``index`` s (B, N), of any real type."""
        with torch.autocast(index.device.type, enabled=False):  # phases are large
            s = _from_lowest(index, mask).to(self.even.dtype)
            phase = s[..., None] * self.frequencies.to(s.dtype)
            cosine, sine = phase.cos()[:, None], phase.sin()[:, None]  # (B, 1, N, M)
            a, b = self.even[:, None], self.odd[:, None]  # (C, 1, M)
            left = torch.stack([cosine, sine], dim=-1).expand(-1, len(a), -1, -1, -1)
            right = torch.stack([a * cosine - b * sine, a * sine + b * cosine], dim=-1)
        return PairFactors.masked(left.flatten(-2), right.flatten(-2), mask)


def _from_lowest(index: Tensor, mask: Tensor | None) -> Tensor:
    """Indices (B, N) minus the lowest of the real cells, which keeps phases small; 0 for padding."""
    if mask is None:
        return index - index.amin(dim=1, keepdim=True)
    highest = torch.finfo(index.dtype).max if index.is_floating_point() else torch.iinfo(index.dtype).max
    lowest = index.masked_fill(~mask, highest).amin(dim=1, keepdim=True)
    return (index - lowest).masked_fill(~mask, 0)
