r"""Gated softmax attention (Qiu et al., NeurIPS 2025).

.. math::

    o = W_o\big[\sigma(x W_g) \odot \operatorname{softmax}(q k^\top / \sqrt{d_h})\, v\big]

with RMS-normalised q and k. The gate is one number per head (``headwise``), one per channel (``elementwise``), or
absent. The N x N matrix is never formed: everything goes through ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

GateType = Literal["headwise", "elementwise", "none"]


class HeadNorm(nn.Module):
    """RMS norm over the channels of a head, with a learned scale in the precision of its input."""

    def __init__(self, d_head: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d_head))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (..., d_h) to the same shape."""
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
        ``"headwise"`` adds d * H weights, ``"elementwise"`` d * d, ``"none"`` none.
    use_qk_norm
        Whether q and k are RMS-normalised per head.
    """

    def __init__(
        self, d_model: int, n_heads: int, *, gate_type: GateType = "headwise", use_qk_norm: bool = True
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of n_heads={n_heads}")
        gates = {"headwise": n_heads, "elementwise": d_model, "none": 0}
        if gate_type not in gates:
            raise ValueError(f"gate_type={gate_type!r} is unknown; choose from {sorted(gates)}")
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.gate = nn.Linear(d_model, gates[gate_type], bias=False) if gates[gate_type] else None
        self.q_norm = HeadNorm(self.d_head) if use_qk_norm else nn.Identity()
        self.k_norm = HeadNorm(self.d_head) if use_qk_norm else nn.Identity()
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` (B, N, d) to (B, N, d); cells where ``mask`` (B, N) is false are attended by nobody."""
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.n_heads, self.d_head).permute(2, 0, 3, 1, 4)  # (B, H, N, d_h)
        attend = None if mask is None else mask[:, None, None, :]
        o = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, attn_mask=attend)
        o = o.transpose(1, 2)  # (B, N, H, d_h)
        if self.gate is not None:
            o = o * self.gate(x).sigmoid().view(b, n, self.n_heads, -1)
        return self.out(o.reshape(b, n, d))
