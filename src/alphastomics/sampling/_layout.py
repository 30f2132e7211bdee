r"""Positions that agree with the conditional mean and with the neighborhood embedding at once.

.. math::

    y^\star = \arg\min_y \; -\frac1n \sum_i \sum_{j \in \mathcal N_i} p_{ij} \log q_{ij}
        + \frac{\lambda}{n} \sum_i \lVert y_i - \hat x_i \rVert^2, \qquad
    p_{ij} = \operatorname*{softmax}_{j \in \mathcal N_i} \frac{f_i \cdot f_j}{\tau}, \quad
    q_{ij} = \frac{(1 + \lVert y_i - y_j \rVert^2 / w^2)^{-1}}{\sum_{k \ne i} (1 + \lVert y_i - y_k \rVert^2 / w^2)^{-1}}

In the conditional mean :math:`\hat x` a cell that may lie in two places lies between them, near unrelated cells. The unit
vectors :math:`f` of the neighborhood embedding separate the two places; :math:`\mathcal N_i` are the K cells nearest to i in
the embedding. The first term is the objective of t-SNE (van der Maaten & Hinton 2008), as in
:func:`alphastomics.diffusion.losses.layout_error`; the second keeps cells near their conditional mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

N_NEIGHBORS = 40
WIDTH = 0.05  # w, in model units per square root of dimension
ANCHOR = 3.0  # lambda
TEMPERATURE = 0.1  # tau, that of the contrastive loss
N_ITERATIONS, RATE = 60, 0.03
ROWS = 1024  # rows of the pair matrix that are in memory at once, and whose normalizer an iteration computes


def refine_layout(mean: Tensor, feature: Tensor, generator: torch.Generator) -> Tensor:
    """Minimize the objective from the conditional mean (N, D), given the embedding ``feature`` (N, K) in unit vectors.

    Every iteration of Adam computes the normalizer of q for a random sample of rows: memory is O(rows * N).
    """
    n = len(mean)
    if n < 3:  # attraction and repulsion need two other cells
        return mean
    neighbors, p = _embedding_neighbors(feature, min(N_NEIGHBORS, n - 1))
    squared_width = WIDTH**2 * mean.shape[1]
    y = mean.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([y], lr=RATE)
    for _ in range(N_ITERATIONS):
        rows = torch.randperm(n, generator=generator)[:ROWS].to(mean.device)
        with torch.enable_grad():
            near = (y[:, None] - y[neighbors]).square().sum(-1) / squared_width
            attraction = (p * near.log1p()).sum(1).mean()
            kernel = 1 / (1 + (y[rows, None] - y).square().sum(-1) / squared_width)
            repulsion = (kernel.sum(1) - 1).log().mean()  # less the cell itself
            anchor = (y - mean).square().sum(1).mean()
            loss = attraction + repulsion + ANCHOR * anchor
        (y.grad,) = torch.autograd.grad(loss, y)
        optimizer.step()
    return y.detach()


def _embedding_neighbors(feature: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k cells nearest in the embedding and their weights, both (N, k)."""
    neighbors, weights = [], []
    for start in range(0, len(feature), ROWS):
        similarity = feature[start : start + ROWS] @ feature.T
        row = torch.arange(len(similarity), device=feature.device)
        similarity[row, start + row] = -torch.inf
        value, index = similarity.topk(k, dim=1)
        neighbors.append(index)
        weights.append((value / TEMPERATURE).softmax(1))
    return torch.cat(neighbors), torch.cat(weights)
