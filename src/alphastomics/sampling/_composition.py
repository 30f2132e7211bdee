r"""Contexts and weights with the composition of the reference, for a query in which some cell states are over-represented.

The network places a cell given the other cells of its context, and was trained on contexts of the reference. Dissociated cells that
were sorted, or of which one kind survived better, have another composition. With the k nearest cells :math:`N_Q`
of Q, in expression, and the cells of the reference R,

.. math:: w_i = \frac{1}{k} \sum_{j \in N_Q(i)} \frac{\lvert Q \rvert}{k \lvert R \rvert} \, \#\{l \in R : j \in N_Q(l)\}, \qquad
          \rho_i = \frac{m}{w_i}, \qquad a_i = \max(1, J / \rho_i)

is the weight of a cell by the number of reference cells that it is nearest to (importance weighting by nearest neighbors: Kremer et al. 2015,
Astron. Comput. 12:67), the frequency of cells like i relative to that in the reference, and the number of the J contexts of which a
cell with :math:`\rho_i > 2` is part. The other cells are part of all contexts; :math:`m`, the median of w over reference cells, makes their
frequencies comparable. Every reference cell has nearest cells in Q, however much both sets differ otherwise: another instrument or
specimen does not change the weights as it changes the odds of a classifier.

In the refinement of a layout (:mod:`alphastomics.sampling._layout`), where these cells would push the others away, they have the weight
:math:`1 / \rho_i` if a tenth of the cells have :math:`\rho_i > 5` and match cells of the reference
(:mod:`alphastomics.sampling._confidence`). Kinds that the reference lacks are not over-represented: the query has more tissue of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.sampling._cells import ANCHOR_SHARE, split_contexts
from alphastomics.sampling._confidence import UNMATCHED, directions, nearest_rows, standardized_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import CellSource
    from alphastomics.sampling._cells import Contexts
    from alphastomics.sampling._confidence import ConfidenceCells

MIN_CELLS = 50  # of a query, below which its composition is mostly chance
N_NEAREST = 60  # k
MIN_WEIGHT = 0.02  # cells of a kind that the reference lacks have no weight
MAX_RATIO = 2.0  # of frequencies, above which cells are part of a share of the contexts
MIN_SHARE = 0.01  # of such cells
OTHER_RATIO = 5.0  # of frequencies, in another composition
OTHER_SHARE = 0.1  # of matching cells above it
MAX_REPEATS = 6.0  # cells in all contexts, as a multiple of the cells of the query


def relative_frequency(cells: ConfidenceCells, source: CellSource, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    r"""Frequency :math:`\rho` (N,) of cells like those in ``rows`` of one slice of a query, relative to that in the reference."""
    ratio = np.ones(len(rows))
    if len(rows) < MIN_CELLS:
        return ratio
    for block, searched, held_out, query in standardized_blocks(cells, source, rows):
        x, y = directions(np.concatenate([searched, held_out]), query)
        chosen = nearest_rows(y, x, N_NEAREST)[1]
        weight = np.bincount(chosen.ravel(), minlength=len(y)) * (len(y) / chosen.size)
        weight = np.maximum(weight[nearest_rows(y, y, N_NEAREST)[1]].mean(1), MIN_WEIGHT)
        ratio[block] = np.median(weight[chosen].mean(1)) / weight
    return ratio


def is_other_composition(ratio: NDArray[np.float64], confidence: NDArray[np.float64]) -> bool:
    """Whether many cells of a query are of kinds of the reference that are much more frequent in the query."""
    return bool(((ratio > OTHER_RATIO) & (confidence >= UNMATCHED)).mean() > OTHER_SHARE)


def composition_weights(ratio: NDArray[np.float64], confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights (N,) with which the composition of a query is that of the reference; 1 if they do not differ much."""
    return np.where(is_other_composition(ratio, confidence) & (ratio > MAX_RATIO), 1 / ratio, 1.0)


def composed_contexts(ratio: NDArray[np.float64], max_context: int, device: torch.device) -> Contexts:
    r"""Contexts that cover all cells, in which those with a ratio :math:`\rho_i > 2` are as frequent as in the reference.

    Without such cells, the contexts of :func:`split_contexts`.
    """
    frequent = ratio > MAX_RATIO
    if frequent.mean() < MIN_SHARE:
        return split_contexts(len(ratio), max_context, device)
    others, chosen = np.flatnonzero(~frequent), np.flatnonzero(frequent)
    n_anchors = len(others) if len(others) <= max_context // 2 else int(ANCHOR_SHARE * max_context)
    rest = others[n_anchors:]
    room = max(1, (max_context - n_anchors) // 2)  # for the rest, and for the frequent cells
    most = MAX_REPEATS * len(ratio) / (n_anchors + (1 / ratio[chosen]).sum())
    least = max(1, -(-len(rest) // room), -(-len(chosen) // room))
    n = max(least, int(min(most, np.ceil(np.quantile(ratio[chosen], 0.9)))))
    n_parts = np.clip(np.round(n / ratio[chosen]), 1, max(1, n * room // len(chosen))).astype(int)
    cell = np.concatenate([np.repeat(chosen, n_parts), rest])
    # Successive contexts, so that the parts of a cell differ, and all contexts are of the same size.
    context = np.concatenate([np.arange(n_parts.sum()), np.arange(len(rest))]) % n
    return [
        (torch.from_numpy(np.concatenate([others[:n_anchors], cell[context == j]])).to(device), n_anchors)
        for j in range(n)
    ]
