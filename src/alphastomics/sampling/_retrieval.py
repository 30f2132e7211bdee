r"""Retrieval of reference cells by the neighborhood embedding.

A cell that may lie in several places has its conditional mean :math:`\hat x` between them, and differs from its neighbors by itself.
In a draw, a share :math:`\pi` of the cells start at the position r of a reference cell that is drawn by its neighborhood embedding,

.. math::

    x_i = \begin{cases} r_J & \text{with probability } \pi, \\ \hat x_i & \text{otherwise}, \end{cases} \qquad
    P_\tau(J = j) \propto \exp\!\Big(\frac{f_i \cdot g_j}{\tau}\Big)

with the unit vectors f of the query and g of the reference and the temperature :math:`\tau` of the contrastive loss, whose optimum is
the density ratio of neighbors to random cells (van den Oord et al. 2018, arXiv:1807.03748): :math:`r_J` is a sample from what the
embedding determines about the position of a cell.

A placement starts at the average of two estimates with different errors,

.. math:: x_i = (1 - w)\, \hat x_i + w \sum_{j \in N_i} P_\tau(J = j \mid J \in N_i)\, r_j ,

with the K reference cells :math:`N_i` whose embeddings are nearest to that of cell i. These, and their probabilities, are those of the
embedding g of each cell alone (:mod:`alphastomics.nn.cell_encoder`), whose errors resemble those of the conditional mean less. The weight
w is 3/4, and 0 for counts, log-normalized and binary values: by those of another specimen, the retrieved positions are less accurate than
the mean.

The mean of a cell whose kind occurs throughout the tissue lies in its middle. Placed independently of the others, a cell lies where the
reference cells around are most likely retrieved,

.. math:: x_i = r_{j^\star}, \qquad j^\star = \arg\max_j \frac1k \sum_{l \in N_k(j)} P_\tau(J = l)

with the k reference cells nearest to j: the mode of the density of its position relative to that of the reference cells. In place of
the products in :math:`P_\tau`,

.. math:: s_{ij} = \tfrac12 \rho_{ij} + \tfrac14 (f_i \cdot f_j + g_i \cdot g_j)

are similarities by both embeddings and by the correlation :math:`\rho` of expression over genes (network units): the embeddings are learned
from cells that one technique measured, the correlation is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from scipy.spatial import KDTree

from alphastomics.diffusion.losses import TEMPERATURE

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.sampling._reference_cells import ReferenceCells

SHARE = 0.3  # pi
WEIGHT = 0.75  # w, of values other than counts, log-normalized and binary ones
N_NEAREST = 30  # K: in an average over all reference cells, distant ones would have a large effect
N_AROUND = 30  # k
ROWS = 1024  # cells whose probabilities are in memory at once


def retrieve_positions(cells: ReferenceCells, feature: Tensor, mean: Tensor, generator: torch.Generator) -> Tensor:
    """Starting positions (N, D) of a draw, given unit vectors ``feature`` (N, K) and the conditional mean (N, D)."""
    reference, position = torch.from_numpy(cells.feature), torch.from_numpy(cells.position)
    start, chosen = mean.clone(), (torch.rand(len(mean), generator=generator) < SHARE).nonzero()[:, 0]
    for rows in chosen.split(ROWS):
        probability = _probability(feature[rows.to(feature.device)], reference, TEMPERATURE)
        start[rows.to(start.device)] = position[probability.multinomial(1, generator=generator)[:, 0]].to(start)
    return start


def average_positions(cells: ReferenceCells, feature: Tensor, mean: Tensor, weight: float) -> Tensor:
    """Average (N, D) of the conditional mean (N, D) and, with ``weight``, of retrieved positions.

    ``feature`` (N, K) are the embeddings of the cells alone.
    """
    reference, position = torch.from_numpy(cells.cell_feature), torch.from_numpy(cells.position)
    retrieved = []
    for block in feature.cpu().split(ROWS):
        similarity, nearest = (block @ reference.T).topk(min(N_NEAREST, len(reference)))
        probability = (similarity / TEMPERATURE).softmax(1)
        retrieved.append((probability[..., None] * position[nearest]).sum(1))
    return (1 - weight) * mean + weight * torch.cat(retrieved).to(mean)


def mode_positions(cells: ReferenceCells, feature: Tensor, expression: Tensor, measured: Tensor) -> Tensor:
    """Positions (N, D) of highest density, each of one cell alone, on the CPU.

    ``feature`` (N, 2 K) are both embeddings of the cells, unit vectors. ``expression`` (N, G) is compared in the ``measured`` genes (G,).
    """
    stored, n = torch.from_numpy(cells.expression), len(cells.position)
    reference = torch.cat([torch.from_numpy(cells.joint_feature), _standardized(stored[:, measured])], dim=1)
    feature = torch.cat([feature.cpu(), _standardized(expression[:, measured])], dim=1)
    k = min(N_AROUND, n)
    around = KDTree(cells.position).query(cells.position, k)[1].reshape(-1)
    average = sp.csr_array((np.full(n * k, 1 / k, dtype=np.float32), around, np.arange(0, n * k + 1, k)), shape=(n, n))
    best = [
        (average @ _probability(block, reference, 2 * TEMPERATURE).numpy().T).argmax(0) for block in feature.split(ROWS)
    ]
    return torch.from_numpy(cells.position[np.concatenate(best)])


def _standardized(expression: Tensor) -> Tensor:
    """Expression (N, G) of each cell minus its mean, unit vectors: products are correlations."""
    return F.normalize(expression - expression.mean(1, keepdim=True), dim=1)


def _probability(feature: Tensor, reference: Tensor, temperature: float) -> Tensor:
    """Probabilities (n, M) of the reference cells, on the CPU."""
    return (feature.cpu() @ reference.T / temperature).softmax(1)
