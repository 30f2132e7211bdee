r"""Attention along the cells of pair features, on factors: axial attention, and cross attention between the factors.

**Axial attention** (Ho et al. 2019) updates p along its rows, then along its columns. The weights are shared by all rows
(columns) and the values are p itself, so that it is exact on factors: each side attends along its own cells,

.. math::

    R'_c &= R_c + \Gamma_c B R_c, \qquad L'_c = L_c + \Gamma'_c A L_c
        \quad\Longleftrightarrow\quad p'_c = (I + \Gamma'_c A)\, p_c\, (I + \Gamma_c B)^\top \\
    B_{jk} &= \operatorname*{softmax}_k (q_j \cdot k_k / \sqrt{d_h}), \qquad
    (q, k, \Gamma)_j = W\,[\hat p_{jj},\, \overline{\hat p_{j\cdot}},\, \overline{\hat p_{\cdot j}}] + b

The hat is the RMS norm. A and its gain depend on p after the first step. The result depends on p only, not on its
factorization. Time is O(N^2 R C), memory O(N R C).

**Cross attention** is attention of each side of the factors to the other, rank by rank,

.. math::

    z_{L,r} &= \operatorname{Attention}(\operatorname{LN} L_r,\ \operatorname{LN} R_r), \qquad
    z_{R,r} = \operatorname{Attention}(\operatorname{LN} R_r,\ \operatorname{LN} L_r) \\
    L'_{ir} &= L_{ir} + \sigma(W_L [L_{ir}; z_{L,ir}]) \odot z_{L,ir}, \qquad
    R'_{jr} = R_{jr} + \sigma(W_R [R_{jr}; z_{R,jr}]) \odot z_{R,jr} \\
    L'' &= L'\,(I + M_L), \qquad R'' = R'\,(I + M_R)

Queries are computed from the first argument, keys and values from the second; a vector is the C channels of one cell and
rank. All ranks share the weights, and M mixes ranks. Attention and mixing are initialized to zero. This acts on the factors,
not on p: other factors of the same p give another result. Time is O(N^2 R C), memory O(N R C).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alphastomics.nn.pair.factors import PairFactors


def key_mask(mask: Tensor | None) -> Tensor | None:
    """Mask (B, 1, 1, N) of keys: real cells, or all cells in a context that is all padding."""
    if mask is None:
        return None
    return (mask | ~mask.any(dim=1, keepdim=True))[:, None, None]


class FactorAxis(nn.Module):
    """Attention along the cells of one side, with the same weights for all cells of the other side."""

    def __init__(self, n_channels: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_channels = n_heads, n_channels
        self.query_key = nn.Linear(3 * n_channels, 2 * n_channels)
        self.gain = nn.Linear(3 * n_channels, n_channels)
        nn.init.zeros_(self.gain.weight)
        nn.init.zeros_(self.gain.bias)

    def forward(self, side: Tensor, marginals: Tensor, mask: Tensor | None) -> Tensor:
        """Update of ``side`` (B, C, N, X), given the ``marginals`` (B, N, 3C) of its cells."""
        b, c, n, _ = side.shape
        q, k = self.query_key(marginals).view(b, n, 2, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        v = side.unflatten(1, (self.n_heads, -1)).transpose(2, 3).flatten(-2)  # (B, H, N, C X / H)
        wider = v.shape[-1] - q.shape[-1]  # with unequal widths the kernel stores the scores
        o = F.scaled_dot_product_attention(
            F.pad(q, (0, wider)),
            F.pad(k, (0, wider)),
            v.to(q.dtype),
            attn_mask=key_mask(mask),
            scale=(c // self.n_heads) ** -0.5,
        )
        o = o.unflatten(-1, (c // self.n_heads, -1)).transpose(2, 3).flatten(1, 2)
        return o * self.gain(marginals).mT.unsqueeze(-1)


class AxialAttention(nn.Module):
    """Attention along the rows and columns of pair features; untrained, it is the identity.

    Parameters
    ----------
    n_channels
        C.
    n_heads
        H; C must be a multiple.

    Raises
    ------
    ValueError
        If C is not a multiple of H.
    """

    def __init__(self, n_channels: int, n_heads: int) -> None:
        super().__init__()
        if n_channels % n_heads:
            raise ValueError(f"n_channels={n_channels} is not a multiple of n_heads={n_heads}")
        self.row, self.column = FactorAxis(n_channels, n_heads), FactorAxis(n_channels, n_heads)

    def forward(self, pair: PairFactors) -> PairFactors:
        """Map factors to factors of the same rank."""
        right = pair.right + self.row(pair.right, pair.rms_norm().marginals(), pair.mask)
        pair = PairFactors.masked(pair.left, right, pair.mask)
        left = pair.left + self.column(pair.left, pair.rms_norm().marginals(), pair.mask)
        return PairFactors.masked(left, pair.right, pair.mask)


class SideAttention(nn.Module):
    """Gated attention of one side of the factors to the other."""

    def __init__(self, n_channels: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm, self.other_norm = nn.LayerNorm(n_channels), nn.LayerNorm(n_channels)
        self.query = nn.Linear(n_channels, n_channels)
        self.key_value = nn.Linear(n_channels, 2 * n_channels)
        self.out = nn.Linear(n_channels, n_channels)
        self.gate = nn.Linear(2 * n_channels, n_channels)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, other: Tensor, keys: Tensor | None) -> Tensor:
        """Update of ``x`` (M, N, C) by attention to the cells of ``other`` (M, N, C) where ``keys`` (M, 1, 1, N) is true."""
        m, n, c = x.shape
        q = self.query(self.norm(x)).view(m, n, self.n_heads, -1).transpose(1, 2)
        k, v = self.key_value(self.other_norm(other)).view(m, n, 2, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        z = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=keys).transpose(1, 2).reshape(m, n, c))
        return self.gate(torch.cat([x, z], dim=-1)).sigmoid() * z


class FactorCrossAttention(nn.Module):
    """Attention of each side of the factors to the other; untrained, it is the identity.

    Parameters
    ----------
    n_channels
        C.
    n_heads
        H; C must be a multiple.
    max_rank
        Largest rank; smaller ranks use the first weights of the mix.

    Raises
    ------
    ValueError
        If C is not a multiple of H.
    """

    def __init__(self, n_channels: int, n_heads: int, max_rank: int) -> None:
        super().__init__()
        if n_channels % n_heads:
            raise ValueError(f"n_channels={n_channels} is not a multiple of n_heads={n_heads}")
        self.left, self.right = SideAttention(n_channels, n_heads), SideAttention(n_channels, n_heads)
        self.mix = nn.Parameter(torch.zeros(2, max_rank, max_rank))

    def forward(self, pair: PairFactors) -> PairFactors:
        """Map factors to factors of the same rank."""
        b, r = len(pair.left), pair.rank
        left, right = (side.permute(0, 3, 2, 1).flatten(0, 1) for side in pair[:2])  # (B R, N, C)
        keys = key_mask(pair.mask)
        if keys is not None:
            keys = keys.repeat_interleave(r, dim=0)
        updates = self.left(left, right, keys), self.right(right, left, keys)
        left, right = (
            _mixed(side + update.unflatten(0, (b, r)).permute(0, 3, 2, 1), mix)
            for side, update, mix in zip(pair[:2], updates, self.mix[:, :r, :r], strict=True)
        )
        return PairFactors.masked(left, right, pair.mask)


def _mixed(side: Tensor, mix: Tensor) -> Tensor:
    return side + side @ mix
