r"""Pair features as a tensor of all pairs: the oracle of the layers on factors, for small N.

.. math:: p \in \mathbb{R}^{B \times N \times N \times C}, \qquad p_{ijc} = 0 \text{ if cell } i \text{ or } j \text{ is padding}

:class:`DensePairs` has the operations of :class:`~alphastomics.nn.pair.PairFactors`. :func:`factorize` and
:class:`DenseTemplate` make factors of a given tensor by the truncated singular value decomposition, the best approximation
of rank R (Eckart & Young 1936),

.. math::

    T_t \approx \sum_{r=1}^{R} \sigma_{tr}\, u_{tr} v_{tr}^\top, \qquad
    p_{ijc} = \sum_t W_{ct} \sum_r (\sqrt{\sigma_{tr}}\, u_{itr}) (\sqrt{\sigma_{tr}}\, v_{jtr}) .

:class:`DenseAxialAttention` is axial attention (Ho et al. 2019) with queries, keys, values and gates of every pair,

.. math::

    p^{(1)}_{ij} = p_{ij} + \Gamma_{ij} \odot \sum_k B_{i;jk}\, v_{ik}, \qquad
    p'_{ij} = p^{(1)}_{ij} + \Gamma'_{ij} \odot \sum_k A_{j;ik}\, v'_{kj} .
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alphastomics.nn.pair.axial import key_mask
from alphastomics.nn.pair.factors import PairFactors, upcast


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


MOST_CELLS = 2048  # a decomposition takes O(N^3)


@torch.no_grad()
def factorize(values: Tensor, rank: int, mask: Tensor | None = None) -> PairFactors:
    """Factors of rank R nearest to ``values`` (B, N, N, C), without a gradient, which would not be finite.

    Raises
    ------
    ValueError
        If there are more than 2048 cells, or fewer than R.
    """
    n = values.shape[1]
    if n > MOST_CELLS:
        raise ValueError(f"a matrix of {n} cells is too large to factorize; Template makes factors of positions")
    if rank > n:
        raise ValueError(f"rank={rank} is more than the {n} cells of the matrix")
    matrices = upcast(DensePairs.masked(values, mask).values).permute(0, 3, 1, 2)
    u, sigma, vt = torch.linalg.svd(matrices, full_matrices=False)
    root = sigma[..., None, :rank].sqrt()
    return PairFactors.masked(u[..., :rank] * root, vt.mT[..., :rank] * root, mask)


class DenseTemplate(nn.Module):
    """A template of all pairs, such as measured distances or contacts, to factors.

    Parameters
    ----------
    n_templates
        Channels of the template.
    n_channels
        C.
    rank
        R, of each channel of the template.
    """

    def __init__(self, n_templates: int, n_channels: int, *, rank: int) -> None:
        super().__init__()
        self.rank, self.per_template = rank * n_templates, rank
        self.weight = nn.Parameter(n_templates**-0.5 * torch.randn(n_channels, n_templates))

    def forward(self, template: Tensor, mask: Tensor | None = None) -> PairFactors:
        """``template`` (B, N, N, T), at most 2048 cells, to factors (B, C, N, R T)."""
        factors = factorize(template, self.per_template, mask)
        left = factors.left.transpose(1, 2).flatten(-2)[:, None]  # (B, 1, N, T R)
        right = factors.right.transpose(1, 2)[:, None] * self.weight[:, None, :, None]  # (B, C, N, T, R)
        right = right.flatten(-2)
        return PairFactors(left.expand_as(right), right, mask)


class PairAxis(nn.Module):
    """Gated attention along the second axis of a tensor of all pairs, with weights for each row."""

    def __init__(self, n_channels: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(n_channels)
        self.qkv = nn.Linear(n_channels, 3 * n_channels)
        self.gate = nn.Linear(n_channels, n_channels)
        self.out = nn.Linear(n_channels, n_channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """Update of ``values`` (B, N, N, C)."""
        b, n, _, c = values.shape
        x = self.norm(values)
        q, k, v = self.qkv(x).view(b * n, n, 3, self.n_heads, c // self.n_heads).permute(2, 0, 3, 1, 4)
        keys = key_mask(mask)
        if keys is not None:
            keys = keys.repeat_interleave(n, dim=0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=keys)
        return self.out(o.transpose(1, 2).reshape(values.shape)) * self.gate(x).sigmoid()


class DenseAxialAttention(nn.Module):
    """Attention along the rows and columns of a tensor of all pairs; at first it changes nothing."""

    def __init__(self, n_channels: int, n_heads: int) -> None:
        super().__init__()
        self.row, self.column = PairAxis(n_channels, n_heads), PairAxis(n_channels, n_heads)

    def forward(self, p: Tensor, mask: Tensor | None = None) -> Tensor:
        """``p`` (B, N, N, C) to the same after attention."""
        values = DensePairs.masked(p, mask).values
        rows = DensePairs.masked(values + self.row(values, mask), mask).transposed().values
        return DensePairs.masked(rows + self.column(rows, mask), mask).transposed().values
