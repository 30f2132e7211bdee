r"""Retrieval of reference cells: the part of a draw in which every cell differs by itself.

A cell that may lie in several places has its conditional mean :math:`\hat x` between them. In a draw, a share :math:`\pi` of the
cells start at the position r of a reference cell that is drawn by its neighborhood embedding,

.. math::

    x_i = \begin{cases} r_J & \text{with probability } \pi, \\ \hat x_i & \text{otherwise}, \end{cases} \qquad
    P(J = j) \propto \exp\!\Big(\frac{f_i \cdot g_j}{\tau}\Big)

with the unit vectors f of the query and g of the reference and the temperature :math:`\tau` of the contrastive loss, whose optimum is
the density ratio of neighbors to random cells (van den Oord et al. 2018, arXiv:1807.03748): :math:`r_J` is a sample from what the
embedding determines about the position of a cell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from alphastomics.diffusion.losses import TEMPERATURE

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.sampling._reference_cells import ReferenceCells

SHARE = 0.3  # pi
ROWS = 1024  # cells whose probabilities are in memory at once


def retrieve_positions(cells: ReferenceCells, feature: Tensor, mean: Tensor, generator: torch.Generator) -> Tensor:
    """Starting positions (N, D) of a draw, given unit vectors ``feature`` (N, K) and the conditional mean (N, D)."""
    reference, position = torch.from_numpy(cells.feature), torch.from_numpy(cells.position)
    start, chosen = mean.clone(), (torch.rand(len(mean), generator=generator) < SHARE).nonzero()[:, 0]
    for rows in chosen.split(ROWS):
        probability = (feature[rows.to(feature.device)].cpu() @ reference.T / TEMPERATURE).softmax(1)
        start[rows.to(start.device)] = position[probability.multinomial(1, generator=generator)[:, 0]].to(start)
    return start
