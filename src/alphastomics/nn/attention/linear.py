r"""Linear attention (Shen et al., WACV 2021): a baseline without gates whose time and memory are linear in N.

.. math::

    o = W_o\, \phi(q)\, \big[\psi(k)^\top v\big], \qquad
    \phi(q)_{ic} = \operatorname*{softmax}_c q_{ic}, \quad \psi(k)_{jc} = \operatorname*{softmax}_j k_{jc}

per head. If cells are split over processes, each process holds some rows of :math:`\psi(k)`, and the sum over j includes a sum
over processes. :math:`A = \phi(q)\,\psi(k)^\top` is an attention matrix: it is not negative, and its rows sum to 1. Its rank is at
most the number of channels of a head, and it is never formed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from alphastomics.nn.attention.softmax import channels_per_head
from alphastomics.nn.geometry import at_least_32_bits, processes_of
from alphastomics.nn.parallel import SINGLE_PROCESS

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.nn.geometry import Geometry
    from alphastomics.nn.parallel import SequenceParallel


class LinearAttention(nn.Module):
    """Multi-head linear attention over the cells of a context.

    Parameters
    ----------
    d_model
        Width d.
    n_heads
        Number of heads H; d must be a multiple.
    """

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.d_head = n_heads, channels_per_head(d_model, n_heads)
        self.qkv = nn.Linear(d_model, 3 * n_heads * self.d_head)
        self.out = nn.Linear(n_heads * self.d_head, d_model)

    def features(
        self, x: Tensor, mask: Tensor | None, parallel: SequenceParallel = SINGLE_PROCESS
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Features of q and k, and v, each (B, H, N, d_h)."""
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.n_heads, self.d_head).permute(2, 0, 3, 1, 4)
        if mask is not None:
            # The minimum is finite, because a process may hold only padding.
            k = k.masked_fill(~mask[:, None, :, None], torch.finfo(k.dtype).min)
        psi = k.softmax(dim=-2)
        if parallel.world_size > 1:
            local = k.to(at_least_32_bits(k.dtype)).logsumexp(dim=2, keepdim=True)
            psi = psi * (local - parallel.gather(local, dim=2).logsumexp(dim=2, keepdim=True)).exp()
        return q.softmax(dim=-1), psi, v

    def forward(self, x: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Map ``x`` (B, N, d) to (B, N, d); no cell attends to cells where ``mask`` (B, N) is false."""
        parallel = processes_of(geometry)
        q, k, v = self.features(x, mask, parallel)
        o = q @ parallel.sum_over_cells(k.mT @ v.to(k.dtype))
        return self.out(o.transpose(1, 2).flatten(-2))

    def gates(self, x: Tensor) -> None:
        """None, because there are no gates."""

    def weights(self, x: Tensor, rows: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Rows (R,) of the attention matrix, (B, H, R, N)."""
        q, k, _ = self.features(x, mask)
        return q[:, :, rows] @ k.mT

    def received(self, x: Tensor, geometry: Geometry | None = None, mask: Tensor | None = None) -> Tensor:
        """Mean attention that each cell receives from real cells, (B, H, N)."""
        q, k, _ = self.features(x, mask)
        if mask is None:
            mean = q.mean(dim=2, keepdim=True)
        else:
            real = mask[:, None, :, None].to(q.dtype)
            mean = (q * real).sum(dim=2, keepdim=True) / real.sum(dim=2, keepdim=True)
        return (k * mean).sum(dim=-1)
