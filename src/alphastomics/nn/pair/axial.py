r"""Axial attention (Ho et al. 2019) on pair features: along the rows, then along the columns.

.. math::

    p^{(1)}_{ij} = p_{ij} + \Gamma_{ij} \odot \sum_k B_{i;jk}\, v_{ik}, \qquad
    p'_{ij} = p^{(1)}_{ij} + \Gamma'_{ij} \odot \sum_k A_{j;ik}\, v'_{kj}

with a softmax over k for each head. Two kinds differ in what the weights A and B depend on.

``"pair"`` is for a tensor of all pairs: queries, keys, values and gates of every edge, each row and column with weights
of its own. Time is O(N^3 C).

``"factor"`` shares weights and gains along the other axis and takes p for the values, which makes it exact on factors:
each side attends along its own cells,

.. math::

    R'_c &= R_c + \Gamma_c B R_c, \qquad L'_c = L_c + \Gamma'_c A L_c
        \quad\Longleftrightarrow\quad p'_c = (I + \Gamma'_c A)\, p_c\, (I + \Gamma_c B)^\top \\
    B_{jk} &= \operatorname*{softmax}_k (q_j \cdot k_k / \sqrt{d_h}), \qquad
    (q, k, \Gamma)_j = W\,[\hat p_{jj},\, \overline{\hat p_{j\cdot}},\, \overline{\hat p_{\cdot j}}] + b

The hat is the RMS norm; A and its gain are of the p after the first step. It is a function of p, whatever the factors.
Time is O(N^2 R C), memory O(N R C).

Attention between the two sides of pair features, rank by rank.

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

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from alphastomics.nn.pair.dense import DensePairs
from alphastomics.nn.pair.factors import PairFactors

if TYPE_CHECKING:
    from torch import Tensor

AxialKind = Literal["pair", "factor"]


def attended(mask: Tensor | None) -> Tensor | None:
    """Keys (B, 1, 1, N) that attention may look at; a context of padding alone looks at all, as it must at some."""
    if mask is None:
        return None
    return (mask | ~mask.any(dim=1, keepdim=True))[:, None, None]


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
        keys = attended(mask)
        if keys is not None:
            keys = keys.repeat_interleave(n, dim=0)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=keys)
        return self.out(o.transpose(1, 2).reshape(values.shape)) * self.gate(x).sigmoid()


class FactorAxis(nn.Module):
    """Attention along one side of pair features, with weights that all of the other side share."""

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
        wider = v.shape[-1] - q.shape[-1]  # of equal width, or scores would be stored
        o = F.scaled_dot_product_attention(
            F.pad(q, (0, wider)),
            F.pad(k, (0, wider)),
            v.to(q.dtype),
            attn_mask=attended(mask),
            scale=(c // self.n_heads) ** -0.5,
        )
        o = o.unflatten(-1, (c // self.n_heads, -1)).transpose(2, 3).flatten(1, 2)
        return o * self.gain(marginals).mT.unsqueeze(-1)


class AxialAttention(nn.Module):
    """Attention along the rows and columns of pair features; at first it changes nothing.

    Parameters
    ----------
    n_channels
        C.
    n_heads
        H; C must be a multiple.
    kind
        ``"pair"``, for tensors, or ``"factor"``, for factors and for tensors as their reference.

    Raises
    ------
    ValueError
        If the kind is unknown, or C is not a multiple of H.
    """

    def __init__(self, n_channels: int, n_heads: int, kind: AxialKind = "factor") -> None:
        super().__init__()
        if kind not in ("pair", "factor"):
            raise ValueError(f"kind={kind!r} is unknown; choose 'pair' or 'factor'")
        if n_channels % n_heads:
            raise ValueError(f"n_channels={n_channels} is not a multiple of n_heads={n_heads}")
        axis = PairAxis if kind == "pair" else FactorAxis
        self.kind = kind
        self.row, self.column = axis(n_channels, n_heads), axis(n_channels, n_heads)

    def forward(self, pair: PairFactors | Tensor, mask: Tensor | None = None) -> PairFactors | Tensor:
        """Pair features, factors or p (B, N, N, C), to those after attention.

        ``mask`` (B, N) is that of a tensor; factors have their own.

        Raises
        ------
        TypeError
            If attention of the kind ``"pair"`` is given factors.
        """
        if isinstance(pair, PairFactors):
            if self.kind == "pair":
                raise TypeError("axial attention over all pairs needs a tensor; take kind='factor' for factors")
            return self._on_factors(pair)
        dense = DensePairs.masked(pair, mask)
        if self.kind == "pair":
            rows = DensePairs.masked(dense.values + self.row(dense.values, mask), mask)
            turned = rows.transposed()
            columns = DensePairs.masked(turned.values + self.column(turned.values, mask), mask)
            return columns.transposed().values
        return self._by_side(dense)

    def _on_factors(self, pair: PairFactors) -> PairFactors:
        right = pair.right + self.row(pair.right, pair.rms_norm().marginals(), pair.mask)
        pair = PairFactors.masked(pair.left, right, pair.mask)
        left = pair.left + self.column(pair.left, pair.rms_norm().marginals(), pair.mask)
        return PairFactors.masked(left, pair.right, pair.mask)

    def _by_side(self, pair: DensePairs) -> Tensor:
        """Apply the kind ``"factor"`` to a tensor, whose rows and columns take the place of ranks."""
        side = pair.values.permute(0, 3, 2, 1)
        side = side + self.row(side, pair.rms_norm().marginals(), pair.mask)
        pair = DensePairs.masked(side.permute(0, 3, 2, 1), pair.mask)
        side = pair.values.permute(0, 3, 1, 2)
        side = side + self.column(side, pair.rms_norm().marginals(), pair.mask)
        return DensePairs.masked(side.permute(0, 2, 3, 1), pair.mask).values


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
