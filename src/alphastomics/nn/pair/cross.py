r"""Attention between the two sides of pair features, rank by rank.

.. math::

    z_{L,r} &= \operatorname{Attention}(\operatorname{LN} L_r,\ \operatorname{LN} R_r), \qquad
    z_{R,r} = \operatorname{Attention}(\operatorname{LN} R_r,\ \operatorname{LN} L_r) \\
    L'_{ir} &= L_{ir} + \sigma(W_L [L_{ir}; z_{L,ir}]) \odot z_{L,ir}, \qquad
    R'_{jr} = R_{jr} + \sigma(W_R [R_{jr}; z_{R,jr}]) \odot z_{R,jr} \\
    L'' &= L'\,(I + M_L), \qquad R'' = R'\,(I + M_R)

Queries come from the first argument, keys and values from the second; a vector is the C channels of one cell and rank.
All ranks share the weights, and M mixes them. Attention and mixing start at zero.

This acts on the factors, not on p: other factors of the same p give another result. Time is O(N^2 R C), memory
O(N R C).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from alphastomics.nn.pair.axial import attended
from alphastomics.nn.pair.factors import PairFactors

if TYPE_CHECKING:
    from torch import Tensor


class OneSide(nn.Module):
    """One side, which attends to the other, and its gate."""

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
        """Update of ``x`` (M, N, C), which looks at ``other`` (M, N, C) where ``keys`` (M, 1, 1, N) is true."""
        m, n, c = x.shape
        q = self.query(self.norm(x)).view(m, n, self.n_heads, -1).transpose(1, 2)
        k, v = self.key_value(self.other_norm(other)).view(m, n, 2, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        z = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=keys).transpose(1, 2).reshape(m, n, c))
        return self.gate(torch.cat([x, z], dim=-1)).sigmoid() * z


class FactorCrossAttention(nn.Module):
    """Each side of the factors attends to the other; at first this changes nothing.

    Parameters
    ----------
    n_channels
        C.
    n_heads
        H; C must be a multiple.
    max_rank
        The largest rank. Fewer ranks use the first weights of the mix.

    Raises
    ------
    ValueError
        If C is not a multiple of H.
    """

    def __init__(self, n_channels: int, n_heads: int, max_rank: int) -> None:
        super().__init__()
        if n_channels % n_heads:
            raise ValueError(f"n_channels={n_channels} is not a multiple of n_heads={n_heads}")
        self.left, self.right = OneSide(n_channels, n_heads), OneSide(n_channels, n_heads)
        self.mix = nn.Parameter(torch.zeros(2, max_rank, max_rank))

    def forward(self, pair: PairFactors) -> PairFactors:
        """Factors to factors of the same rank."""
        b, r = len(pair.left), pair.rank
        left, right = (side.permute(0, 3, 2, 1).flatten(0, 1) for side in pair[:2])  # (B R, N, C)
        keys = attended(pair.mask)
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
