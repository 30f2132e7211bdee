r"""Features of the difference of two places in an order, as exact factors.

.. math::

    p_{ijc} = \sum_{m=1}^{M} a_{cm} \cos \omega_m (s_i - s_j) + b_{cm} \sin \omega_m (s_i - s_j)

for the index s of each cell: a serial section, a residue, or any real number. The coefficients a make the even part of
the function, b the odd one. The addition theorem gives factors of rank 2M, two ranks for each m:

.. math::

    L_{icm} = [\cos \omega_m s_i,\; \sin \omega_m s_i], \qquad
    R_{jcm} = [a_{cm} \cos \omega_m s_j - b_{cm} \sin \omega_m s_j,\; a_{cm} \sin \omega_m s_j + b_{cm} \cos \omega_m s_j]

There is no largest index, and a shift of all indices changes nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from alphastomics.nn.pair.factors import PairFactors


class RelativePosition(nn.Module):
    """Indices of the cells in an order to pair features that depend on their differences alone.

    Parameters
    ----------
    n_channels
        C.
    n_frequencies
        M. For differences clipped to 32 among 300 cells, the coefficient of determination is .97 with 8 and .998 with
        16.
    longest, shortest
        Wavelengths in units of the index; the frequencies are geometrically spaced between them. The longest should
        exceed the range of the indices; integers cannot tell wavelengths under 2 from longer ones.

    Raises
    ------
    ValueError
        If there is no frequency, or the wavelengths are not positive and in order.
    """

    def __init__(
        self, n_channels: int, *, n_frequencies: int = 16, longest: float = 1024.0, shortest: float = 2.0
    ) -> None:
        super().__init__()
        if n_frequencies < 1:
            raise ValueError(f"n_frequencies={n_frequencies} must be at least 1")
        if not 0 < shortest <= longest:
            raise ValueError(f"shortest={shortest} must be positive and at most longest={longest}")
        self.rank = 2 * n_frequencies
        wavelength = torch.logspace(math.log10(longest), math.log10(shortest), n_frequencies, dtype=torch.float64)
        self.frequencies: Tensor
        self.register_buffer("frequencies", (2 * math.pi / wavelength).float(), persistent=False)
        spread = n_frequencies**-0.5
        self.even = nn.Parameter(spread * torch.randn(n_channels, n_frequencies))
        self.odd = nn.Parameter(spread * torch.randn(n_channels, n_frequencies))

    def forward(self, index: Tensor, mask: Tensor | None = None) -> PairFactors:
        """``index`` s (B, N), of any real type, to factors of rank 2M."""
        with torch.autocast(index.device.type, enabled=False):  # phases are large
            s = _from_lowest(index, mask).to(self.even.dtype)
            phase = s[..., None] * self.frequencies.to(s.dtype)
            cosine, sine = phase.cos()[:, None], phase.sin()[:, None]  # (B, 1, N, M)
            a, b = self.even[:, None], self.odd[:, None]  # (C, 1, M)
            left = torch.stack([cosine, sine], dim=-1).expand(-1, len(a), -1, -1, -1)
            right = torch.stack([a * cosine - b * sine, a * sine + b * cosine], dim=-1)
        return PairFactors.masked(left.flatten(-2), right.flatten(-2), mask)


def _from_lowest(index: Tensor, mask: Tensor | None) -> Tensor:
    """Indices (B, N) counted from the lowest of the real cells, which keeps phases small; 0 for padded cells."""
    if mask is None:
        return index - index.amin(dim=1, keepdim=True)
    highest = torch.finfo(index.dtype).max if index.is_floating_point() else torch.iinfo(index.dtype).max
    lowest = index.masked_fill(~mask, highest).amin(dim=1, keepdim=True)
    return (index - lowest).masked_fill(~mask, 0)
