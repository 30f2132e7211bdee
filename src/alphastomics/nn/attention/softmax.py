r"""Gated softmax attention (Qiu et al., NeurIPS 2025).

.. math::

    o = W_o\big[\sigma(x W_g) \odot \operatorname{softmax}(q k^\top / \sqrt{d_h})\, v\big], \qquad d_h = \min(d / H, 32)

with RMS-normalized q and k. The H heads may have fewer channels together than x. The gate is one number per head
(``"headwise"``), one per channel (``"elementwise"``), or absent. In training, k and v may be those of a part of the cells only: every
r-th one. All cells attend to these.
``scaled_dot_product_attention`` computes attention without forming the N x N matrix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from alphastomics.config import NetworkConfig
from alphastomics.nn.geometry import processes_of
from alphastomics.nn.parallel import split_attention

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.config import GateType
    from alphastomics.nn.geometry import Geometry
    from alphastomics.nn.parallel import SequenceParallel


MAX_CHANNELS = 32  # of a head
KEY_STRIDE = 4  # r of full attention
BLOCK = 2**23  # entries of the attention matrix in memory at a time, in `received`


def channels_per_head(d_model: int, n_heads: int) -> int:
    """Number of channels of a head, d_h.

    Raises
    ------
    ValueError
        If d is not a multiple of H.
    """
    if d_model % n_heads:
        raise ValueError(f"d_model={d_model} is not a multiple of n_heads={n_heads}; pass another one")
    return min(d_model // n_heads, MAX_CHANNELS)


class HeadNorm(nn.Module):
    """RMS norm over the channels of a head, with a learned scale in the precision of its input."""

    def __init__(self, d_head: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d_head))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x`` (..., d_h)."""
        return F.rms_norm(x, x.shape[-1:]) * self.scale.to(x.dtype)


class SoftmaxAttention(nn.Module):
    """Multi-head attention over the cells of a context.

    Parameters
    ----------
    d_model
        Width d.
    n_heads
        Number of heads H; d must be a multiple.
    gate_type
        ``"headwise"`` adds d * H weights, ``"elementwise"`` d * H * d_h, ``"none"`` none.
    use_qk_norm
        Whether q and k are RMS-normalized per head.
    key_stride
        r, in training; 1 for attention to all cells.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate_type: GateType = NetworkConfig.gate_type,
        use_qk_norm: bool = NetworkConfig.use_qk_norm,
        key_stride: int = 1,
    ) -> None:
        super().__init__()
        self.n_heads, self.d_head, self.key_stride = n_heads, channels_per_head(d_model, n_heads), key_stride
        width = n_heads * self.d_head
        gates = {"headwise": n_heads, "elementwise": width, "none": 0}
        if gate_type not in gates:
            raise ValueError(f"gate_type={gate_type!r} is unknown; choose from {sorted(gates)}")
        self.q, self.kv = nn.Linear(d_model, width), nn.Linear(d_model, 2 * width)
        self.gate = nn.Linear(d_model, gates[gate_type], bias=False) if gates[gate_type] else None
        self.q_norm = HeadNorm(self.d_head) if use_qk_norm else nn.Identity()
        self.k_norm = HeadNorm(self.d_head) if use_qk_norm else nn.Identity()
        self.out = nn.Linear(width, d_model)

    def heads(self, x: Tensor, keys: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Normed q of ``x`` (B, N, d), and normed k and v of ``keys`` (B, M, d), by default ``x``, each (B, H, N or M, d_h)."""
        q = self.q(x).unflatten(-1, (self.n_heads, self.d_head)).transpose(1, 2)
        k, v = self.kv(x if keys is None else keys).unflatten(-1, (2, self.n_heads, self.d_head)).permute(2, 0, 3, 1, 4)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (B, N, d) to (B, N, d); no cell attends to cells where ``mask`` (B, N) is false.

        Only ``geometry.parallel`` is used.
        """
        b, n, _ = x.shape
        parallel, stride = processes_of(geometry), self.key_stride if self.training else 1
        heads = self.heads(x, parallel.every(x, stride))
        o = _attend(*heads, mask, parallel, stride).transpose(1, 2)  # (B, N, H, d_h)
        gates = self.gates(x)
        if gates is not None:
            o = o * gates.view(b, n, self.n_heads, -1)
        return self.out(o.flatten(-2))

    def gates(self, x: Tensor) -> Tensor | None:
        """Gates in (0, 1): (B, N, H) if headwise, (B, N, H d_h) if elementwise, None if there are none."""
        return None if self.gate is None else self.gate(x).sigmoid()

    def weights(self, x: Tensor, rows: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Rows (R,) of the attention matrix, (B, H, R, N)."""
        q, k, _ = self.heads(x)
        return self._softmax(q[:, :, rows], k, mask)

    def received(self, x: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Mean attention that each cell receives from real cells, (B, H, N), computed in blocks of rows."""
        q, k, _ = self.heads(x)
        b, n, _ = x.shape
        total = x.new_zeros(b, self.n_heads, n)
        size = max(1, BLOCK // (b * self.n_heads * n))
        for start in range(0, n, size):
            block = self._softmax(q[:, :, start : start + size], k, mask)
            if mask is not None:
                block = block * mask[:, None, start : start + size, None]
            total += block.sum(dim=2)
        return total / (n if mask is None else mask.sum(dim=1)[:, None, None])

    def _softmax(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.mT / self.d_head**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        return scores.softmax(dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, parallel: SequenceParallel, stride: int) -> Tensor:
    """Attention (B, H, N, d_h) of q to k and v of every ``stride``-th cell; real cells are ``mask`` (B, N)."""
    if parallel.world_size == 1:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if mask is None else mask[:, None, None, ::stride]
        )
    mask = q.new_ones(q.shape[0], q.shape[2], dtype=torch.bool) if mask is None else mask
    return split_attention(q, k, v, mask, parallel, key_mask=parallel.every(mask, stride))
