r"""Pre-norm transformer block whose norms depend on the timesteps (adaptive norm; Peebles & Xie 2023).

.. math::

    x &\leftarrow x + (1 + g_1) \odot \operatorname{Attention}\big((1 + s_1) \odot \operatorname{LN}(x) + b_1\big) \\
    x &\leftarrow x + (1 + g_2) \odot \operatorname{FFN}\big((1 + s_2) \odot \operatorname{LN}(x) + b_2\big)

(s, b, g) is a linear function of the timestep vector, initialized to zero: an untrained block does not depend on the timesteps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import nn

from alphastomics.nn.attention import make_attention
from alphastomics.nn.experts import Experts, Routing
from alphastomics.nn.random import Dropout
from alphastomics.nn.residual import HyperConnection, Residual

if TYPE_CHECKING:
    from collections.abc import MutableSequence

    from torch import Tensor

    from alphastomics.nn.config import DenoiserConfig
    from alphastomics.nn.geometry import Geometry

EXPANSION = 4  # hidden width of the feed-forward network over d


class FeedForward(nn.Sequential):
    """Two-layer network for each cell, with a hidden width of 4 d."""

    def __init__(self, d_model: int) -> None:
        hidden = EXPANSION * d_model
        super().__init__(nn.Linear(d_model, hidden), nn.GELU(), nn.Linear(hidden, d_model))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` (B, N, d) to (B, N, d)."""
        result: Tensor = super().forward(x)
        return result


class Bottleneck(nn.Module):
    r"""Residual branch at a fraction of the width (He et al. 2016; Houlsby et al. 2019), around any operation on cells.

    .. math:: y = x + U f(D \operatorname{LN}(x)), \qquad D \in \mathbb R^{C/r \times C}, \quad U \in \mathbb R^{C \times C/r}

    U is initialized to zero: an untrained layer is the identity.

    Parameters
    ----------
    d_model
        Width C.
    ratio
        r; C must be a multiple.
    operation
        f, a module ``(h, mask=mask)`` from (B, N, C / r) to the same shape, without a residual, such as an attention over the
        cells; None for a GELU.

    Raises
    ------
    ValueError
        If the width is not a multiple of the ratio.
    """

    def __init__(self, d_model: int, *, ratio: int = 4, operation: nn.Module | None = None) -> None:
        super().__init__()
        if ratio < 1 or d_model % ratio:
            raise ValueError(f"d_model={d_model} is not a multiple of ratio={ratio}")
        self.norm = nn.LayerNorm(d_model)
        self.down = nn.Linear(d_model, d_model // ratio)
        self.operation = operation
        self.up = nn.Linear(d_model // ratio, d_model)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def branch(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """U f(D LN(x)), without the residual, the branch of a :class:`~alphastomics.nn.residual.HyperConnection`."""
        h = self.down(self.norm(x))
        y: Tensor = self.up(F.gelu(h) if self.operation is None else self.operation(h, mask=mask))
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (B, N, C) to (B, N, C), 0 where ``mask`` (B, N) is false."""
        y = x + self.branch(x, mask)
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)


class AdaptiveNorm(nn.Module):
    """Layer norm whose scale and shift, and ``n_extra`` further vectors, are linear functions of the timestep vector."""

    def __init__(self, d_model: int, *, n_extra: int = 0) -> None:
        super().__init__()
        self.parts = 2 + n_extra
        self.modulation = nn.Linear(d_model, self.parts * d_model)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, timestep: Tensor) -> tuple[Tensor, ...]:
        """Normed ``x`` (B, N, d) and the extra vectors (B, 1, d), given ``timestep`` (B, d)."""
        scale, shift, *extra = self.modulation(timestep).unsqueeze(1).chunk(self.parts, dim=-1)
        return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift, *extra


class Block(nn.Module):
    """Attention over the cells, then a feed-forward network or a mixture of experts for each cell.

    Parameters
    ----------
    config
        The network.
    angle
        Angle in radians by which the grid of axial attention is turned.
    """

    UNSHARED = ("norm_1", "norm_2", "connect_1", "connect_2")  # not shared between layers

    def __init__(self, config: DenoiserConfig, *, angle: float = 0.0) -> None:
        super().__init__()
        d = config.d_model
        self.norm_1 = AdaptiveNorm(d, n_extra=1)
        self.attention = make_attention(config, angle=angle)
        self.norm_2 = AdaptiveNorm(d, n_extra=1)
        self.ffn: Experts | Bottleneck | nn.Sequential
        if config.use_moe:
            self.ffn = Experts(
                d,
                EXPANSION * d,
                num_experts=config.num_experts,
                top_k=config.moe_top_k,
                width=config.expert_width,
            )
        elif config.bottleneck is not None:
            narrow = FeedForward(d // config.bottleneck)
            self.ffn = Bottleneck(d, ratio=config.bottleneck, operation=narrow)
        else:
            self.ffn = FeedForward(d)
        self.connect_1, self.connect_2 = (
            HyperConnection(d, n_streams=config.n_streams) if config.residual == "hyper" else Residual()
            for _ in range(2)
        )
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        geometry: Geometry | None = None,
        mask: Tensor | None = None,
        routings: MutableSequence[Routing] | None = None,
    ) -> Tensor:
        """Run the block.

        Parameters
        ----------
        x
            Features (B, N, d), or streams of them (B, N, n, d).
        timestep
            (B, d).
        geometry
            Positions, neighbors and pair features of the cells, if attention uses them.
        mask
            Real cells (B, N); None if all are.
        routings
            A list to which the experts append their routing.
        """
        x = self.connect_1(x, lambda h: self.attend(h, timestep, geometry, mask), mask)
        return self.connect_2(x, lambda h: self.feed(h, timestep, mask, routings), mask)

    def attend(self, x: Tensor, timestep: Tensor, geometry: Geometry | None, mask: Tensor | None) -> Tensor:
        """Branch of attention, (B, N, d), without its residual."""
        h, gain = self.norm_1(x, timestep)
        return (1 + gain) * self.dropout(self.attention(h, geometry, mask))

    def feed(
        self, x: Tensor, timestep: Tensor, mask: Tensor | None, routings: MutableSequence[Routing] | None
    ) -> Tensor:
        """Branch of the feed-forward network, (B, N, d), without its residual."""
        h, gain = self.norm_2(x, timestep)
        if isinstance(self.ffn, Experts):
            h, routing = self.ffn(h, mask)
            if routings is not None:
                routings.append(routing)
        else:
            h = self.ffn.branch(h, mask) if isinstance(self.ffn, Bottleneck) else self.ffn(h)
        return (1 + gain) * self.dropout(h)
