r"""Triangle updates of pair features (Jumper et al. 2021, algorithms 11 to 14), on factors.

The hat is the RMS norm over the pairs of a context; k runs over its n real cells.

**Triangle multiplication** is exact:

.. math::

    z_{ijc} &= \tfrac1n \sum_k w_{kc}\, \hat p_{ikc}\, \hat p_{jk,c-1} \;\; \text{(outgoing)}, \qquad
    z_{ijc} = \tfrac1n \sum_k w_{kc}\, \hat p_{kic}\, \hat p_{kj,c-1} \;\; \text{(incoming)} \\
    \Delta p_{ijc} &= g_{ic}\, h_{jc}\, \hat z_{ijc}, \qquad
    (g, w, h)_i = \sigma\big(W\,[\hat p_{ii},\, \overline{\hat p_{i\cdot}},\, \overline{\hat p_{\cdot i}}] + b\big)

On factors the sum over k is one R x R matrix per channel, and the rank remains R:

.. math::

    G_{rs} = \tfrac1n \sum_k w_k R_{kr} R'_{ks}, \quad z = (L\,G)\, L'^\top \;\; \text{(outgoing)}, \qquad
    G_{rs} = \tfrac1n \sum_k w_k L_{kr} L'_{ks}, \quad z = (R\,G)\, R'^\top \;\; \text{(incoming)}

with primes for the factors of channel c - 1. Time is O(N R^2 C) and memory O(N R C), instead of N^3 C and N^2 C for a tensor.

Jumper et al. project p to two sets of channels, a and b, and gate each pair. Neither is closed on factors: a projection
multiplies the rank by C, and the gate of a pair is not separable. Here a is p, b is p with its channels shifted by one, the
gates of a, b and z are products of gates of cells, and :class:`~alphastomics.nn.pair.PairTransition` mixes channels. The result
depends on p only, not on its factorization.

**Triangle attention** attends row by row and projects its output onto the factors:

.. math::

    o_{ij} = \sigma(W_g \hat p_{ij}) \odot \sum_k \operatorname*{softmax}_k\big(
        q_{ij} \cdot k_{ik} / \sqrt{d_h} + b_{jk}\big)\, v_{ik}, \qquad
    (q, k, v)_{ij} = W \hat p_{ij}, \quad b_{jk} = \sum_{c \in h} w_c\, \hat p_{jkc} \;\; \text{(starting)}

for each head h of C/H channels; the ending node is the same for p_ji. Jumper et al. use a layer norm instead of the RMS norm,
and a bias from all channels instead of those of the head. Only S rows of p are in memory at a time; they are recomputed in the
backward pass. The bias is a product of factors: it is not stored, but computed by R C/H further columns of queries and keys:

.. math:: b_{jk} = \sum_{c \in h} \sum_r (w_c L_{jcr})\, R_{kcr} .

The output has full rank. After W_o it is projected onto the right factors, channel by channel (Galerkin projection):

.. math:: \Delta_L = (W_o O)\, R\,(R^\top R)^{-1}, \qquad \Delta_R = R .

Time is O(N^3 d), for up to about 2,000 cells. Memory is O(S N C).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alphastomics.nn.pair.factors import PairFactors, divide_by_gram, gram, upcast

Direction = Literal["outgoing", "incoming"]
Node = Literal["starting", "ending"]

BLOCK = 2**21  # entries of the keys of a block of rows
MASKED_SCORE = -1e4  # score of padding; its weight is 0 in any precision


class TriangleMultiplication(nn.Module):
    """Update of pair features by multiplication over all triangles with a third cell.

    Parameters
    ----------
    n_channels
        C.
    direction
        ``"outgoing"``: edge ij is updated by ik and jk; ``"incoming"``: by ki and kj.

    Raises
    ------
    ValueError
        If the direction is unknown.
    """

    def __init__(self, n_channels: int, direction: Direction) -> None:
        super().__init__()
        if direction not in ("outgoing", "incoming"):
            raise ValueError(f"direction={direction!r} is unknown; choose 'outgoing' or 'incoming'")
        self.direction = direction
        self.gates = nn.Linear(3 * n_channels, 3 * n_channels)

    def forward(self, pair: PairFactors) -> PairFactors:
        """Map factors to the factors of the update."""
        scale = pair.inverse_rms()
        g, w, h = self.gates(pair.marginals() * scale.repeat(1, 1, 3)).sigmoid().chunk(3, dim=-1)
        edges = pair if self.direction == "outgoing" else pair.transposed()
        z = _contract(edges, edges.roll_channels(1), w * scale * scale.roll(1, dims=-1))
        root = z.inverse_rms().sqrt()
        return z.gated(g * root, h * root)


def _contract(a: PairFactors, b: PairFactors, w: Tensor) -> PairFactors:
    """Factors of z_ij, the mean over k of w_k a_ik b_jk, with ``w`` (B, N, C)."""
    core = gram(a.right * w.mT.unsqueeze(-1), b.right) / a.n_real()[..., None]
    left = a.left @ core.to(a.left.dtype)
    return PairFactors(left.to(a.left.dtype), b.left, a.mask)


class TriangleAttention(nn.Module):
    """Update of pair features by attention among the edges of each cell.

    Parameters
    ----------
    n_channels
        C.
    n_heads
        H; C must be a multiple.
    direction
        ``"starting"``: edges ij of the same i attend to each other; ``"ending"``: those of the same j.

    Raises
    ------
    ValueError
        If the direction is unknown, or C is not a multiple of H.
    """

    def __init__(self, n_channels: int, n_heads: int, direction: Node) -> None:
        super().__init__()
        if direction not in ("starting", "ending"):
            raise ValueError(f"direction={direction!r} is unknown; choose 'starting' or 'ending'")
        if n_channels % n_heads:
            raise ValueError(f"n_channels={n_channels} is not a multiple of n_heads={n_heads}")
        self.direction = direction
        self.n_heads, self.d_head = n_heads, n_channels // n_heads
        self.qkv = nn.Linear(n_channels, 3 * n_channels, bias=False)
        self.bias = nn.Parameter(self.d_head**-0.5 * torch.randn(n_channels))
        self.gate = nn.Linear(n_channels, n_channels)
        self.out = nn.Linear(n_channels, n_channels)

    def forward(self, pair: PairFactors) -> PairFactors:
        """Map factors to the factors of the update."""
        factors = pair.rms_norm()
        if self.direction == "starting":
            return self._on_factors(factors)
        return self._on_factors(factors.transposed()).transposed()

    def _on_factors(self, p: PairFactors) -> PairFactors:
        columns = self._columns(p)
        b, _, n, width = columns[1].shape
        size = max(1, BLOCK // (b * self.n_heads * n * (width + self.d_head)))
        parts = [
            checkpoint(self._project_rows, rows, p.right, *columns, use_reentrant=False, preserve_rng_state=False)
            for rows in p.left.split(size, dim=2)
        ]
        left = divide_by_gram(torch.cat(parts, dim=2), p.right).to(p.left.dtype)
        return PairFactors.masked(left, p.right, p.mask)

    def _columns(self, p: PairFactors) -> tuple[Tensor, Tensor]:
        """Columns of queries and of keys for bias and mask, (B, H, N, E) each."""
        query, key = (
            side.unflatten(1, (self.n_heads, -1)).transpose(2, 3).flatten(-2)
            for side in (p.left * self.bias.to(p.left.dtype)[:, None, None], p.right)
        )
        if p.mask is None:
            return query, key
        padded = ((~p.mask).to(key.dtype) * MASKED_SCORE)[:, None, :, None].expand_as(key[..., :1])
        return torch.cat([query, torch.ones_like(padded)], dim=-1), torch.cat([key, padded], dim=-1)

    def _project_rows(self, left: Tensor, right: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Update of the rows of ``left`` (B, C, S, R) times ``right``, (B, C, S, R)."""
        z = (left @ right.mT).permute(0, 2, 3, 1)  # (B, S, N, C)
        b, s, n, _ = z.shape
        q, k, v = self._heads(z)
        query, key = (columns[:, None].expand(b, s, -1, n, -1).to(q.dtype) for columns in (query, key))
        q = torch.cat([q / self.d_head**0.5, query], dim=-1).flatten(0, 1)
        k = torch.cat([k, key], dim=-1).flatten(0, 1)
        v = F.pad(v, (0, q.shape[-1] - self.d_head)).flatten(0, 1)  # with unequal widths the kernel stores the scores
        o = F.scaled_dot_product_attention(q, k, v, scale=1.0)[..., : self.d_head].unflatten(0, (b, s))
        update = self._gated(o, z).permute(0, 3, 1, 2)
        # The update is divided by a Gram matrix, which amplifies rounding if it is nearly singular.
        with torch.autocast(right.device.type, enabled=False):
            return upcast(update) @ upcast(right)

    def _heads(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each (B, S, H, N, d_h), of ``z`` (B, S, N, C)."""
        q, k, v = self.qkv(z).unflatten(-1, (3, self.n_heads, self.d_head)).permute(3, 0, 1, 4, 2, 5)
        return q, k, v

    def _gated(self, o: Tensor, z: Tensor) -> Tensor:
        """Output (B, S, N, C) of the heads ``o`` (B, S, H, N, d_h)."""
        return self.out(o.transpose(2, 3).flatten(-2) * self.gate(z).sigmoid())
