r"""Pair features as a tensor :math:`p_{ijc}` of all pairs: the reference for factors, and the form for small N.

.. math:: p \in \mathbb{R}^{B \times N \times N \times C}, \qquad p_{ijc} = 0 \text{ if cell } i \text{ or } j \text{ is padding}

:class:`DensePairs` offers what :class:`~alphastomics.nn.pair.PairFactors` offers, so that a network which is exact on
factors is written once. Memory grows with the square of N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alphastomics.nn.pair.factors import upcast


class DensePairs(NamedTuple):
    """Pair features of all pairs of cells.

    Attributes
    ----------
    values
        p, (B, N, N, C), zero for padded cells; see :meth:`masked`.
    mask
        Real cells (B, N), or None if all are.
    """

    values: Tensor
    mask: Tensor | None = None

    @classmethod
    def masked(cls, values: Tensor, mask: Tensor | None) -> DensePairs:
        """Features of pairs of real cells: ``values`` (B, N, N, C), those of padded cells set to zero."""
        if mask is not None:
            values = values.masked_fill(~(mask[:, :, None, None] & mask[:, None, :, None]), 0)
        return cls(values, mask)

    def n_real(self) -> Tensor:
        """Number of real cells n, at least 1, (B, 1, 1)."""
        b, n = self.values.shape[:2]
        real = upcast(self.values).dtype
        if self.mask is None:
            return torch.full((b, 1, 1), n, dtype=real, device=self.values.device)
        return self.mask.sum(dim=1).clamp_min(1).to(real)[:, None, None]

    def transposed(self) -> DensePairs:
        """p_ji."""
        return DensePairs(self.values.transpose(1, 2), self.mask)

    def roll_channels(self, shift: int) -> DensePairs:
        """Channel c - ``shift`` in the place of channel c."""
        return DensePairs(self.values.roll(shift, dims=-1), self.mask)

    def gated(self, row: Tensor, column: Tensor) -> DensePairs:
        """g_ic h_jc p_ijc; g is ``row``, h is ``column``, both (B, N, C) or (B, 1, C)."""
        row, column = (gate.to(self.values.dtype) for gate in (row, column))
        return DensePairs(self.values * row[:, :, None] * column[:, None], self.mask)

    def inverse_rms(self, eps: float = 1e-6) -> Tensor:
        """One over the root mean square of p_c over the pairs of real cells, (B, 1, C)."""
        mean_square = upcast(self.values).square().sum(dim=(1, 2))[:, None] / self.n_real() ** 2
        return (mean_square + eps).rsqrt()

    def rms_norm(self) -> DensePairs:
        """p_c over its root mean square."""
        root = self.inverse_rms().sqrt()
        return self.gated(root, root)

    def marginals(self) -> Tensor:
        """Diagonal p_iic, row means and column means over the real cells, side by side, (B, N, 3C)."""
        values, n = upcast(self.values), self.n_real()
        diagonal = values.diagonal(dim1=1, dim2=2).mT
        parts = [diagonal, values.sum(dim=2) / n, values.sum(dim=1) / n]
        return torch.cat(parts, dim=-1).to(self.values.dtype)
