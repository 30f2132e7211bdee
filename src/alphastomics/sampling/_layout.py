r"""Positions that agree with the conditional mean and with the neighborhood embedding at once.

.. math::

    y^\star = \arg\min_y \; \frac1n \sum_i a_i \Big( -\sum_{j \in \mathcal N_i} p_{ij} \log q_{ij}
        + \frac{\lVert y_i - \hat x_i \rVert^2}{2 \sigma^2} \Big), \qquad n = \sum_i a_i, \\
    p_{ij} = \frac{a_j \exp(f_i \cdot f_j / \tau)}{\sum_{k \in \mathcal N_i} a_k \exp(f_i \cdot f_k / \tau)}, \quad
    q_{ij} = \frac{a_j\, (1 + \lVert y_i - y_j \rVert^2 / w^2)^{-1}}{\sum_{k \ne i} a_k\, (1 + \lVert y_i - y_k \rVert^2 / w^2)^{-1}}

In the conditional mean :math:`\hat x` a cell that may lie in two places lies between them, near unrelated cells. The unit
vectors :math:`f` of the neighborhood embedding separate the two places; :math:`\mathcal N_i` are the K cells nearest to i in
the embedding, or nearly all of them in a large slice. The first term is the objective of t-SNE (van der Maaten & Hinton 2008), as in
:func:`alphastomics.diffusion.losses.by_positions`; the second is that of a normal density about the conditional mean. Its variance is
constant, times the share that kriging does not explain where positions are known (:mod:`alphastomics.sampling._kriging`). The width w is
constant, and larger in slices of few cells, where it grows as the distance between cells. Cells of states that are over-represented in the
query have a weight a below 1 (:mod:`alphastomics.sampling._composition`), so that they hardly push the others away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.diffusion.losses import TEMPERATURE

if TYPE_CHECKING:
    from torch import Tensor

N_NEIGHBORS = 40
N_COMPARED = 65_536  # cells on a CPU, above which the search is faster, although it is compiled first
WIDTH, N_CELLS = 0.05, 5000  # w of slices of that many cells or more, in model units per square root of dimension
VARIANCE = 0.5  # sigma^2 where no positions are known, in squared model units
LEAST = 1e-3  # unexplained share: known positions may be predicted without an error
N_ITERATIONS, RATE = 60, 0.03
ROWS = 1024  # rows of the matrix of pairs that are compared at once, or whose normalizer an iteration computes
PAIRS = 2**21  # pairs in memory at once in an iteration on a CPU, whose cache is small
FEWEST_ROWS = 8  # rows of pairs in memory at once, even if they have more pairs


def refine_layout(
    mean: Tensor,
    feature: Tensor,
    generator: torch.Generator,
    *,
    weight: Tensor | None = None,
    unexplained: float = 1.0,
) -> Tensor:
    """Minimize the objective from the conditional mean (N, D), given the embedding ``feature`` (N, K) in unit vectors.

    Every iteration of Adam computes the normalizer of q for a random sample of rows: memory is O(rows * N). ``weight`` (N,) is a, 1 for
    all cells when None. ``unexplained`` is the share of the variance of the mean that is left.
    """
    n_cells = len(mean)
    if n_cells < 3:  # attraction and repulsion need two other cells
        return mean
    weight = mean.new_ones(n_cells) if weight is None else weight.to(mean)
    n = float(weight.sum())
    neighbors, p = _embedding_neighbors(feature, weight, min(N_NEIGHBORS, n_cells - 1))
    squared_width = _width(n, mean.shape[1]) ** 2
    anchor = weight[:, None] / (n * VARIANCE * max(unexplained, LEAST))
    y = mean.clone()
    optimizer = torch.optim.Adam([y], lr=RATE)
    for _ in range(N_ITERATIONS):
        rows = torch.randperm(n_cells, generator=generator)[:ROWS].to(mean.device)
        y.grad = (
            attraction_gradient(y, neighbors, p, weight, squared_width)
            + repulsion_gradient(y, rows, weight, squared_width)
            + anchor * (y - mean)
        )
        optimizer.step()
    return y


def _width(n_cells: float, n_dims: int) -> float:
    """The width w of a slice, in model units."""
    return WIDTH * n_dims**0.5 * max(1.0, (N_CELLS / n_cells) ** (1 / n_dims))


def attraction_gradient(y: Tensor, neighbors: Tensor, p: Tensor, weight: Tensor, squared_width: float) -> Tensor:
    r"""Gradient (N, D) of :math:`\frac1n \sum_{ij} a_i p_{ij} \log(1 + \lVert y_i - y_j \rVert^2 / w^2)`."""
    offset = y[:, None] - y[neighbors]
    share = (weight / weight.sum())[:, None] * p
    force = offset * (2 * share / (squared_width + offset.square().sum(-1)))[..., None]
    return force.sum(1).index_add_(0, neighbors.reshape(-1), -force.reshape(-1, y.shape[1]))


def repulsion_gradient(y: Tensor, rows: Tensor, weight: Tensor, squared_width: float) -> Tensor:
    r"""Gradient (N, D) of the mean of :math:`\log \sum_{k \ne i} a_k\, (1 + \lVert y_i - y_k \rVert^2 / w^2)^{-1}` over rows i, weighted by a."""
    at_once = max(FEWEST_ROWS, PAIRS // len(y)) if y.device.type == "cpu" else len(rows)
    gradient = torch.zeros_like(y)
    for part in rows.split(at_once):
        gradient += _repulsion_of(y, part, weight, squared_width)
    return gradient / weight[rows].sum()


def _repulsion_of(y: Tensor, rows: Tensor, weight: Tensor, squared_width: float) -> Tensor:
    """Gradient (N, D) of the sum over rows."""
    chosen, row_weight = y[rows], weight[rows]
    squared = chosen.square().sum(1)[:, None] + y.square().sum(1) - 2 * chosen @ y.T
    kernel = (1 + squared.clamp_min_(0) / squared_width).reciprocal_()
    total = kernel @ weight - row_weight  # less the cell itself
    force = kernel.square_().mul_((-2 / squared_width * row_weight / total)[:, None])
    gradient = weight[:, None] * (force.sum(0)[:, None] * y - force.T @ chosen)
    return gradient.index_add_(0, rows, (force @ weight)[:, None] * chosen - force @ (weight[:, None] * y))


def _embedding_neighbors(feature: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k cells nearest in the embedding and their p, both (N, k)."""
    search = _search if feature.device.type == "cpu" and len(feature) > N_COMPARED else _compare
    neighbors, similarity = search(feature, k)
    return neighbors, (similarity / TEMPERATURE + weight[neighbors].log()).softmax(1)


def _compare(feature: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k nearest of all other cells, and their inner products with the cell, both (N, k)."""
    neighbors, similarities = [], []
    for start in range(0, len(feature), ROWS):
        similarity = feature[start : start + ROWS] @ feature.T
        similarity.diagonal(start).fill_(-torch.inf)  # the cell itself
        value, index = similarity.topk(k, dim=1)
        neighbors.append(index)
        similarities.append(value)
    return torch.cat(neighbors), torch.cat(similarities)


def _search(feature: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As :func:`_compare`, by nearest-neighbor descent, which misses few of the nearest cells (Dong et al. 2011)."""
    from pynndescent import NNDescent

    n_threads = torch.get_num_threads()
    index, distance = NNDescent(feature.numpy(), n_neighbors=k + 1, random_state=0).neighbor_graph
    torch.set_num_threads(n_threads)  # Numba gives its own number to PyTorch
    others = index != np.arange(len(index))[:, None]
    others[others.all(1), -1] = False  # the cell itself is not found if others are equal to it
    shape = (len(index), k)
    similarity = 1 - np.square(distance[others]).reshape(shape) / 2  # of unit vectors
    return torch.from_numpy(index[others].reshape(shape)).long(), torch.from_numpy(similarity)
