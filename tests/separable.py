r"""Depthwise-separable convolution (Chollet 2017), along a sequence or over neighbors: an oracle, which no network uses.

.. math::

    z_{ic} = \sum_{k} w_{kc}\, x_{i + k,\, c} \;\;\text{(sequence)}, \qquad
    z_{ic} = \sum_{j \in N(i)} \phi_c(d_{ij})\, x_{jc} \;\;\text{(graph)}, \qquad
    y_i = W z_i

The filter over neighbors is continuous (Schütt et al. 2017),

.. math:: \phi_c(d) = \sum_b w_{bc} \exp\big(-(d - \mu_b)^2 / 2 \delta^2\big),

with centers μ_b evenly from 0 to the largest distance and δ their spacing. Filters see one channel and W mixes them: k C
+ C C' or B C + C C' weights, where a full convolution has k C C'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch import Tensor

SeparableKind = Literal["sequence", "graph"]

ENTRIES = 2**22  # of the messages of neighbors that are in memory at once


class SequenceFilter(nn.Module):
    """One filter per channel along a sequence; see the equations at the head of this file.

    Parameters
    ----------
    d_model
        Channels C.
    kernel_size
        Odd number of places that a filter sees.

    Raises
    ------
    ValueError
        If the size is even.
    """

    def __init__(self, d_model: int, *, kernel_size: int) -> None:
        super().__init__()
        if kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} must be odd, so that a filter has a center")
        self.conv = nn.Conv1d(d_model, d_model, kernel_size, padding=kernel_size // 2, groups=d_model, bias=False)

    def forward(self, x: Tensor, mask: Tensor, index: Tensor | None = None) -> Tensor:
        """``x`` (B, N, C) to (B, N, C), along the real cells in order of ``index`` (B, N), or of their rows."""
        if index is None:
            index = torch.arange(x.shape[1], device=x.device).expand(mask.shape)
        order = index.argsort(dim=1, stable=True)
        order = order.gather(1, (~mask).gather(1, order).int().argsort(dim=1, stable=True))  # padding last
        back = order.argsort(dim=1)
        z: Tensor = self.conv(_take(x, order).mT).mT
        return _take(z, back)


def _take(x: Tensor, order: Tensor) -> Tensor:
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))


class GraphFilter(nn.Module):
    """One continuous filter per channel over neighbors; see the equations at the head of this file.

    Cells are visited in blocks whose messages are computed once more in the backward pass.

    Parameters
    ----------
    d_model
        Channels C.
    n_basis
        Number of radial functions B, 2 or more.
    max_distance
        The last center, in the units of positions. Filters vanish beyond.

    Raises
    ------
    ValueError
        If there are fewer than two functions, or the distance is not positive.
    """

    def __init__(self, d_model: int, *, n_basis: int, max_distance: float) -> None:
        super().__init__()
        if n_basis < 2 or max_distance <= 0:
            raise ValueError(f"n_basis={n_basis} must be at least 2 and max_distance={max_distance} positive")
        self.centers: Tensor
        self.register_buffer("centers", torch.linspace(0, max_distance, n_basis), persistent=False)
        self.spacing = max_distance / (n_basis - 1)
        self.phi = nn.Linear(n_basis, d_model, bias=False)

    def forward(self, x: Tensor, position: Tensor, neighbors: Tensor) -> Tensor:
        """``x`` (B, N, C) at ``position`` (B, N, D), with ``neighbors`` (B, N, K), -1 for none, to (B, N, C)."""
        b, n, d_model = x.shape
        step = max(1, ENTRIES // max(1, b * neighbors.shape[2] * d_model))
        blocks = [slice(start, start + step) for start in range(0, n, step)]
        if len(blocks) == 1:
            return self._block(x, position, neighbors, blocks[0])
        parts = [
            checkpoint(self._block, x, position, neighbors, rows, use_reentrant=False, preserve_rng_state=False)
            for rows in blocks
        ]
        return torch.cat(parts, dim=1)

    def _block(self, x: Tensor, position: Tensor, neighbors: Tensor, rows: slice) -> Tensor:
        near = neighbors[:, rows]
        context = torch.arange(len(x), device=x.device)[:, None, None]
        with torch.autocast(x.device.type, enabled=False):
            position = position.to(torch.promote_types(position.dtype, torch.float32))
            distance = (position[context, near.clamp_min(0)] - position[:, rows, None]).norm(dim=-1)
            basis = torch.exp(-(((distance[..., None] - self.centers.to(distance.dtype)) / self.spacing) ** 2) / 2)
            basis = basis * (near >= 0)[..., None]
        phi = self.phi(basis.to(self.phi.weight.dtype))
        z: Tensor = (phi * x[context, near.clamp_min(0)]).sum(dim=2)
        return z


class SeparableConv(nn.Module):
    """A filter per channel, then a mixture of channels per cell, both without bias and without a residual.

    Parameters
    ----------
    d_in, d_out
        Channels C and C'.
    kind
        ``"sequence"`` for cells in an order, ``"graph"`` for cells with neighbors.
    kernel_size
        Of :class:`SequenceFilter`.
    n_basis, max_distance
        Of :class:`GraphFilter`.

    Raises
    ------
    ValueError
        If the kind is unknown, or as for the filter.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        kind: SeparableKind,
        kernel_size: int = 7,
        n_basis: int = 16,
        max_distance: float = 1.0,
    ) -> None:
        super().__init__()
        if kind not in ("sequence", "graph"):
            raise ValueError(f"kind={kind!r} is unknown; choose 'sequence' or 'graph'")
        self.depthwise: SequenceFilter | GraphFilter
        if kind == "sequence":
            self.depthwise = SequenceFilter(d_in, kernel_size=kernel_size)
        else:
            self.depthwise = GraphFilter(d_in, n_basis=n_basis, max_distance=max_distance)
        self.pointwise = nn.Linear(d_in, d_out, bias=False)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        index: Tensor | None = None,
        position: Tensor | None = None,
        neighbors: Tensor | None = None,
    ) -> Tensor:
        """Run the convolution.

        Parameters
        ----------
        x
            (B, N, C), to (B, N, C').
        mask
            Real cells (B, N); the others are as if they were not there, and come out as 0. None when all are real.
        index
            Along a sequence: numbers (B, N) whose order is that of the cells; None when they are in order.
        position
            On a graph: positions (B, N, D).
        neighbors
            On a graph: numbers of the neighbors of each cell (B, N, K), -1 for none.

        Raises
        ------
        ValueError
            If a graph comes without positions or neighbors.
        """
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        if isinstance(self.depthwise, SequenceFilter):
            real = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
            y: Tensor = self.pointwise(self.depthwise(x, real, index))
        elif position is None or neighbors is None:
            raise ValueError("a convolution over neighbors needs position and neighbors")
        else:
            if mask is not None:
                position = position.masked_fill(~mask[..., None], 0.0)
            y = self.pointwise(self.depthwise(x, position, neighbors))
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)
