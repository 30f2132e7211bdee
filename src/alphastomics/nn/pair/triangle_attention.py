r"""Triangle attention (Jumper et al. 2021, algorithms 13 and 14) on factors, row by row.

.. math::

    o_{ij} = \sigma(W_g \hat p_{ij}) \odot \sum_k \operatorname*{softmax}_k\big(
        q_{ij} \cdot k_{ik} / \sqrt{d_h} + b_{jk}\big)\, v_{ik}, \qquad
    (q, k, v)_{ij} = W \hat p_{ij}, \quad b_{jk} = \sum_{c \in h} w_c\, \hat p_{jkc} \;\; \text{(starting)}

for each head h of C/H channels; the ending node is the same for p_ji. The hat is the RMS norm over pairs, where the
source has layer norm, and a bias is of the channels of its head, where the source takes all. Only S rows of p exist at
a time, and they are made again in the backward pass. No bias is stored: it is a product of factors, so it enters the
scores as R C/H further columns of queries and keys,

.. math:: b_{jk} = \sum_{c \in h} \sum_r (w_c L_{jcr})\, R_{kcr} .

The output is no longer of low rank. It is projected on to the right factors, channel by channel, the nearest that they
can express (a Galerkin projection), and W_o acts before that:

.. math:: \Delta_L = (W_o O)\, R\,(R^\top R)^{-1}, \qquad \Delta_R = R .

Time is O(N^3 d): this is for some 2,000 cells. Memory is O(S N C).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alphastomics.nn.pair.dense import DensePairs
from alphastomics.nn.pair.factors import PairFactors, divide_by_gram

Node = Literal["starting", "ending"]

BLOCK = 2**21  # entries of the keys that a chunk of rows may hold
NEVER = -1e4  # score of a padded cell, whose weight is then 0 in every precision


class TriangleAttention(nn.Module):
    """The update of pair features by attention among the edges of one cell.

    Parameters
    ----------
    n_channels
        C.
    n_heads
        H; C must be a multiple.
    direction
        ``"starting"``: edges ij of the same i attend to each other; ``"ending"``: those of the same j.
    chunk
        Number of rows S that exist at the same time; by default as many as hold 2^21 entries.

    Raises
    ------
    ValueError
        If the direction is unknown, C is not a multiple of H, or the chunk is empty.
    """

    def __init__(
        self, n_channels: int, n_heads: int, direction: Node = "starting", *, chunk: int | None = None
    ) -> None:
        super().__init__()
        if direction not in ("starting", "ending"):
            raise ValueError(f"direction={direction!r} is unknown; choose 'starting' or 'ending'")
        if n_channels % n_heads:
            raise ValueError(f"n_channels={n_channels} is not a multiple of n_heads={n_heads}")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk={chunk} must be at least 1")
        self.direction, self.chunk = direction, chunk
        self.n_heads, self.d_head = n_heads, n_channels // n_heads
        self.qkv = nn.Linear(n_channels, 3 * n_channels, bias=False)
        self.bias = nn.Parameter(self.d_head**-0.5 * torch.randn(n_channels))
        self.gate = nn.Linear(n_channels, n_channels)
        self.out = nn.Linear(n_channels, n_channels)

    def forward(self, pair: PairFactors | Tensor, mask: Tensor | None = None) -> PairFactors | Tensor:
        """Factors to the factors of the update, or p (B, N, N, C) to the update, which is not projected.

        ``mask`` (B, N) is that of a tensor; factors have their own. The tensor is the reference: it keeps all scores.
        """
        if isinstance(pair, PairFactors):
            factors = pair.rms_norm()
            if self.direction == "starting":
                return self._on_factors(factors)
            return self._on_factors(factors.transposed()).transposed()
        dense = DensePairs.masked(pair, mask).rms_norm()
        if self.direction == "starting":
            return self._on_dense(dense).values
        return self._on_dense(dense.transposed()).transposed().values

    def _on_factors(self, p: PairFactors) -> PairFactors:
        columns = self._columns(p)
        size = self.chunk or self._chunk_of(columns[1])
        parts = [
            checkpoint(self._project_rows, rows, p.right, *columns, use_reentrant=False, preserve_rng_state=False)
            for rows in p.left.split(size, dim=2)
        ]
        left = divide_by_gram(torch.cat(parts, dim=2), p.right).to(p.left.dtype)
        return PairFactors.masked(left, p.right, p.mask)

    def _chunk_of(self, key: Tensor) -> int:
        b, _, n, width = key.shape
        return max(1, BLOCK // (b * self.n_heads * n * (width + self.d_head)))

    def _columns(self, p: PairFactors) -> tuple[Tensor, Tensor]:
        """Columns of the bias and of the mask, of queries and of keys, (B, H, N, E) each."""
        query, key = (
            side.unflatten(1, (self.n_heads, -1)).transpose(2, 3).flatten(-2)
            for side in (p.left * self.bias.to(p.left.dtype)[:, None, None], p.right)
        )
        if p.mask is None:
            return query, key
        padded = ((~p.mask).to(key.dtype) * NEVER)[:, None, :, None].expand_as(key[..., :1])
        return torch.cat([query, torch.ones_like(padded)], dim=-1), torch.cat([key, padded], dim=-1)

    def _project_rows(self, left: Tensor, right: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Update of the rows of ``left`` (B, C, S, R) times ``right``, (B, C, S, R)."""
        z = (left @ right.mT).permute(0, 2, 3, 1)  # (B, S, N, C)
        b, s, n, _ = z.shape
        q, k, v = self._heads(z)
        query, key = (columns[:, None].expand(b, s, -1, n, -1).to(q.dtype) for columns in (query, key))
        q = torch.cat([q / self.d_head**0.5, query], dim=-1).flatten(0, 1)
        k = torch.cat([k, key], dim=-1).flatten(0, 1)
        v = F.pad(v, (0, q.shape[-1] - self.d_head)).flatten(0, 1)  # equal widths, or scores would be stored
        o = F.scaled_dot_product_attention(q, k, v, scale=1.0)[..., : self.d_head].unflatten(0, (b, s))
        return self._gated(o, z).permute(0, 3, 1, 2).to(right.dtype) @ right

    def _on_dense(self, p: DensePairs) -> DensePairs:
        q, k, v = self._heads(p.values)
        bias = (p.values * self.bias).unflatten(-1, (self.n_heads, -1)).sum(dim=-1)  # (B, N, N, H)
        score = q @ k.mT / self.d_head**0.5 + bias.permute(0, 3, 1, 2)[:, None]
        if p.mask is not None:
            score = score.masked_fill(~p.mask[:, None, None, None], NEVER)
        return DensePairs.masked(self._gated(score.softmax(dim=-1) @ v, p.values), p.mask)

    def _heads(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, S, H, N, d_h), of ``z`` (B, S, N, C)."""
        q, k, v = self.qkv(z).unflatten(-1, (3, self.n_heads, self.d_head)).permute(3, 0, 1, 4, 2, 5)
        return q, k, v

    def _gated(self, o: Tensor, z: Tensor) -> Tensor:
        """Output (B, S, N, C) of the heads ``o`` (B, S, H, N, d_h)."""
        return self.out(o.transpose(2, 3).flatten(-2) * self.gate(z).sigmoid())
