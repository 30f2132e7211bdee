"""A small MLP trained on random contexts of single slices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Perceptron(nn.Module):
    """Hidden layers of equal width with layer norm, GELU and dropout, then a linear read-out."""

    def __init__(self, n_in: int, n_hidden: int, n_out: int, *, n_layers: int, dropout: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in [n_in] + [n_hidden] * (n_layers - 2):
            layers += [nn.Linear(width, n_hidden), nn.LayerNorm(n_hidden), nn.GELU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(n_hidden, n_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``(n_cells, n_in)`` to ``(n_cells, n_out)``."""
        return self.layers(x)


def train_on_slices(
    network: nn.Module,
    expression: NDArray[np.float64],
    positions: NDArray[np.float64],
    rows: Sequence[NDArray[np.intp]],
    loss: Loss,
    *,
    n_epochs: float,
    min_steps: int,
    context_size: int,
    gene_dropout: float,
    learning_rate: float,
    weight_decay: float,
    seed: int,
) -> None:
    """Minimize ``loss(output, positions)`` over random contexts, each drawn from one slice in proportion to its size.

    The contexts amount to ``n_epochs`` passes over the cells, but to no fewer than ``min_steps``. A share
    ``gene_dropout`` of the input entries is set to 0, the mean of a centered gene. The learning rate falls to zero along
    a half cosine.
    """
    rng = np.random.default_rng(seed)
    n_steps = max(min_steps, round(n_epochs * len(expression) / context_size))
    x, y = torch.as_tensor(expression, dtype=torch.float32), torch.as_tensor(positions, dtype=torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, n_steps)
    sizes = np.array([len(r) for r in rows], dtype=float)
    network.train()
    for _ in range(n_steps):
        cells = rows[rng.choice(len(rows), p=sizes / sizes.sum())]
        cells = torch.from_numpy(rng.choice(cells, size=min(context_size, len(cells)), replace=False))
        context = x[cells]
        if gene_dropout:
            context = context * torch.from_numpy(rng.random(context.shape, dtype=np.float32) >= gene_dropout)
        optimizer.zero_grad()
        loss(network(context), y[cells]).backward()
        optimizer.step()
        schedule.step()
    network.eval()


@torch.no_grad()
def apply(network: nn.Module, expression: NDArray[np.float64]) -> NDArray[np.float64]:
    """Output of the network for every cell, in evaluation mode."""
    return network(torch.as_tensor(expression, dtype=torch.float32)).double().numpy()


def spread(positions: NDArray[np.float64], rows: Sequence[NDArray[np.intp]]) -> float:
    """Root mean square radius of the slices, the median over them."""
    centered = (positions[r] - positions[r].mean(axis=0) for r in rows)
    return float(np.median([np.sqrt((p**2).sum(axis=1).mean()) for p in centered]))
