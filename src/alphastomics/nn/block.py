r"""Pre-norm transformer block whose norms follow the clocks (adaptive norm; Peebles & Xie 2023).

.. math::

    x &\leftarrow x + (1 + g_1) \odot \operatorname{Attention}\big((1 + s_1) \odot \operatorname{LN}(x) + b_1\big) \\
    x &\leftarrow x + (1 + g_2) \odot \operatorname{FFN}\big((1 + s_2) \odot \operatorname{LN}(x) + b_2\big)

(s, b, g) is a linear function of the clock vector that starts at zero: at first the block ignores the clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from alphastomics.nn.attention import AttentionKind, GateType, make_attention
from alphastomics.nn.experts import Experts, ExpertWidth, Routing

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.nn.geometry import Geometry


class AdaptiveNorm(nn.Module):
    """Layer norm without weights whose scale and shift, and further ``n_extra`` vectors, come from the clocks."""

    def __init__(self, d_model: int, *, n_extra: int = 0) -> None:
        super().__init__()
        self.parts = 2 + n_extra
        self.modulation = nn.Linear(d_model, self.parts * d_model)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, clock: Tensor) -> tuple[Tensor, ...]:
        """``x`` (B, N, d), ``clock`` (B, d) to the normed x and the extra vectors (B, 1, d)."""
        scale, shift, *extra = self.modulation(clock).unsqueeze(1).chunk(self.parts, dim=-1)
        return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift, *extra


class Block(nn.Module):
    """Attention over the cells, then a feed-forward network or a mixture of experts per cell.

    Parameters
    ----------
    d_model, n_heads, gate_type, use_qk_norm
        As in :class:`~alphastomics.nn.SoftmaxAttention`.
    dropout
        Share of the branch outputs dropped in training (not of attention weights).
    expansion
        Width of the feed-forward network over d.
    attention
        ``"full"`` or ``"linear"``.
    use_moe
        Whether :class:`~alphastomics.nn.experts.Experts` take the place of the feed-forward network.
    num_experts, moe_top_k, expert_width
        As in :class:`~alphastomics.nn.experts.Experts`.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate_type: GateType,
        use_qk_norm: bool,
        dropout: float,
        expansion: int = 4,
        attention: AttentionKind = "full",
        use_moe: bool = False,
        num_experts: int = 4,
        moe_top_k: int = 2,
        expert_width: ExpertWidth = "split",
    ) -> None:
        super().__init__()
        d_ff = expansion * d_model
        self.norm_1 = AdaptiveNorm(d_model, n_extra=1)
        self.attention = make_attention(attention, d_model, n_heads, gate_type=gate_type, use_qk_norm=use_qk_norm)
        self.norm_2 = AdaptiveNorm(d_model, n_extra=1)
        self.ffn: Experts | nn.Sequential
        if use_moe:
            self.ffn = Experts(d_model, d_ff, num_experts=num_experts, top_k=moe_top_k, width=expert_width)
        else:
            self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        clock: Tensor,
        geometry: Geometry | None = None,
        mask: Tensor | None = None,
        routings: list[Routing] | None = None,
    ) -> Tensor:
        """``x`` (B, N, d), ``clock`` (B, d), ``mask`` (B, N) or None, to (B, N, d); experts add to ``routings``."""
        h, gain = self.norm_1(x, clock)
        x = x + (1 + gain) * self.dropout(self.attention(h, geometry, mask))
        h, gain = self.norm_2(x, clock)
        if isinstance(self.ffn, Experts):
            h, routing = self.ffn(h, mask)
            if routings is not None:
                routings.append(routing)
        else:
            h = self.ffn(h)
        return x + (1 + gain) * self.dropout(h)
