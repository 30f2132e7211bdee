r"""Positions that agree with the conditional mean and with the neighborhood embedding at once.

.. math::

    y^\star = \arg\min_y \; -\frac1n \sum_i \sum_{j \in \mathcal N_i} p_{ij} \log q_{ij}
        + \frac{\lambda}{n} \sum_i \lVert y_i - \hat x_i \rVert^2, \qquad
    p_{ij} = \operatorname*{softmax}_{j \in \mathcal N_i} \frac{f_i \cdot f_j}{\tau}, \quad
    q_{ij} = \frac{(1 + \lVert y_i - y_j \rVert^2 / w^2)^{-1}}{\sum_{k \ne i} (1 + \lVert y_i - y_k \rVert^2 / w^2)^{-1}}

In the conditional mean :math:`\hat x` a cell that may lie in two places lies between them, near unrelated cells. The unit
vectors :math:`f` of the neighborhood embedding separate the two places; :math:`\mathcal N_i` are the K cells nearest to i in
the embedding. The first term is the objective of t-SNE (van der Maaten & Hinton 2008), as in
:func:`alphastomics.diffusion.losses.layout_error`; the second keeps cells near their conditional mean. The width w is constant, and larger
in slices of few cells, where it grows as the distance between cells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from alphastomics.diffusion.losses import TEMPERATURE

if TYPE_CHECKING:
    from torch import Tensor

N_NEIGHBORS = 40
WIDTH, N_CELLS = 0.05, 5000  # w of slices of that many cells or more, in model units per square root of dimension
ANCHOR = 1.0  # lambda
KNOWN_ANCHOR = 5.0  # lambda where positions of some cells are known, which makes the mean more exact
N_ITERATIONS, RATE = 60, 0.03
ROWS = 1024  # rows of the pair matrix that are in memory at once, and whose normalizer an iteration computes


def refine_layout(mean: Tensor, feature: Tensor, generator: torch.Generator, fixed: Tensor | None = None) -> Tensor:
    """Minimize the objective from the conditional mean (N, D), given the embedding ``feature`` (N, K) in unit vectors.

    Every iteration of Adam computes the normalizer of q for a random sample of rows: memory is O(rows * N). Cells that are
    ``fixed`` (N,) do not move.
    """
    n = len(mean)
    if n < 3:  # attraction and repulsion need two other cells
        return mean
    neighbors, p = _embedding_neighbors(feature, min(N_NEIGHBORS, n - 1))
    squared_width = _width(n, mean.shape[1]) ** 2
    anchor = ANCHOR if fixed is None else KNOWN_ANCHOR
    y = mean.clone()
    optimizer = torch.optim.Adam([y], lr=RATE)
    for _ in range(N_ITERATIONS):
        rows = torch.randperm(n, generator=generator)[:ROWS].to(mean.device)
        y.grad = (
            attraction_gradient(y, neighbors, p, squared_width)
            + repulsion_gradient(y, rows, squared_width)
            + 2 * anchor / n * (y - mean)
        )
        if fixed is not None:
            y.grad[fixed] = 0.0
        optimizer.step()
    return y


def _width(n_cells: int, n_dims: int) -> float:
    """The width w of a slice, in model units."""
    return WIDTH * n_dims**0.5 * max(1.0, (N_CELLS / n_cells) ** (1 / n_dims))


def attraction_gradient(y: Tensor, neighbors: Tensor, p: Tensor, squared_width: float) -> Tensor:
    r"""Gradient (N, D) of :math:`\frac1n \sum_{ij} p_{ij} \log(1 + \lVert y_i - y_j \rVert^2 / w^2)`."""
    n, k = neighbors.shape
    offset = y[:, None] - y[neighbors]
    force = offset * (2 / n * p / (squared_width + offset.square().sum(-1)))[..., None]
    return force.sum(1).index_add_(0, neighbors.reshape(-1), -force.reshape(n * k, -1))


def repulsion_gradient(y: Tensor, rows: Tensor, squared_width: float) -> Tensor:
    r"""Gradient (N, D) of :math:`\frac1{|R|} \sum_{i \in R} \log \sum_{k \ne i} (1 + \lVert y_i - y_k \rVert^2 / w^2)^{-1}`."""
    chosen = y[rows]
    squared = chosen.square().sum(1)[:, None] + y.square().sum(1) - 2 * chosen @ y.T
    kernel = (1 + squared.clamp_min_(0) / squared_width).reciprocal_()
    total = kernel.sum(1) - 1  # less the cell itself
    weight = kernel.square_() * (-2 / (squared_width * len(rows)) / total)[:, None]
    gradient = weight.sum(0)[:, None] * y - weight.T @ chosen
    return gradient.index_add_(0, rows, weight.sum(1)[:, None] * chosen - weight @ y)


def _embedding_neighbors(feature: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k cells nearest in the embedding and their weights, both (N, k)."""
    neighbors, weights = [], []
    for start in range(0, len(feature), ROWS):
        similarity = feature[start : start + ROWS] @ feature.T
        similarity.diagonal(start).fill_(-torch.inf)  # the cell itself
        value, index = similarity.topk(k, dim=1)
        neighbors.append(index)
        weights.append((value / TEMPERATURE).softmax(1))
    return torch.cat(neighbors), torch.cat(weights)
