r"""Minimum-distance refinement: an E(D)-equivariant denoiser of positions at the scale of a cell.

Cells do not overlap, so that distances to nearest neighbors vary far less than those of independent points. This holds at full
density only, not in a random subset of a slice, and in any frame: a separate network learns it. With positions :math:`y` and
their noise :math:`r` in units of the cell spacing, and the k nearest neighbors :math:`\mathcal N(i)`,

.. math::

    m_{ij} &= \phi\big(h_i, h_j, \rho(\log \lVert y_i - y_j \rVert), \rho(\log r)\big), \qquad
    h_i \leftarrow h_i + \psi\big(h_i, \operatorname{mean}_j m_{ij}\big) \\
    y_i &\leftarrow y_i + \frac{r}{\sqrt{1 + r^2}}\, \operatorname{mean}_j\, c(m_{ij})\,
        \frac{y_i - y_j}{\lVert y_i - y_j \rVert + \delta}

(after Satorras et al. 2021). The output is equivariant to rotations, reflections and shifts of the input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, N_LAYERS = 32, 2  # channels of h and of the messages, and rounds of messages
N_BASIS, BASIS_RANGE, BASIS_WIDTH = 16, 2.5, 0.35  # of the radial functions rho of a logarithm
SOFTENING = 0.3  # delta: at less than a third of the spacing, directions are mostly noise


class MinDistanceNetwork(nn.Module):
    """Estimate of clean positions from noisy ones; see the equations of the module."""

    n_neighbors = 12  # k

    def __init__(self) -> None:
        super().__init__()
        self.centers: Tensor
        self.register_buffer("centers", torch.linspace(-BASIS_RANGE, BASIS_RANGE, N_BASIS), persistent=False)
        self.start = nn.Linear(N_BASIS, WIDTH)
        self.message = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * WIDTH + 2 * N_BASIS, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
            for _ in range(N_LAYERS)
        )
        self.update = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(N_LAYERS - 1)  # h is not used after the last round
        )
        self.push = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(N_LAYERS))

    def basis(self, value: Tensor) -> Tensor:
        """Radial functions (..., n_basis) of a logarithm (...)."""
        return torch.exp(-(((value[..., None] - self.centers) / BASIS_WIDTH) ** 2))

    def forward(self, y: Tensor, r: Tensor, neighbors: Tensor) -> Tensor:
        """Clean positions (N, D) from ``y`` (N, D) and ``r`` (), both in units of the spacing, and ``neighbors`` (N, k)."""
        with torch.autocast(y.device.type, enabled=False):
            level = self.basis(r.log())
            h = self.start(level).expand(len(y), -1)
            gain = r / torch.sqrt(1 + r**2)
            for layer, (message, push) in enumerate(zip(self.message, self.push, strict=True)):
                # Unlike that of y[neighbors], the gradient of an embedding is summed in a fixed order.
                offset = y[:, None] - F.embedding(neighbors, y)  # (N, k, D)
                distance = offset.norm(dim=-1) + 1e-6
                pair = (h[:, None].expand(-1, neighbors.shape[1], -1), F.embedding(neighbors, h))
                features = (self.basis(distance.log()), level.expand(*distance.shape, -1))
                m = message(torch.cat([*pair, *features], dim=-1))
                if layer < len(self.update):
                    h = h + self.update[layer](torch.cat([h, m.mean(1)], dim=-1))
                y = y + gain * (push(m) * offset / (distance[..., None] + SOFTENING)).mean(1)
            return y
