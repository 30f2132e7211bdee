r"""Training losses of the two modalities, each averaged over real cells and measured genes.

.. math::

    L_\text{mse} &= \frac{\sum_i m_i w\,\lVert x_i - \hat x_i\rVert^2}{D \sum_i m_i} \\
    L_\text{distance} &= \frac{1}{n(n-1)} \sum_{i \ne j} (D_{ij} - \hat D_{ij})^2, \qquad D_{ij} = \lVert x_i - x_j\rVert \\
    L_\text{aligned} &= L_\text{mse}(x R^\star, \hat x), \qquad R^\star = \text{Kabsch}(x, \hat x) \\
    L_\text{neighbor} &= -\frac1n \sum_i \sum_{j \ne i} p_{ij} \log q_{ij}, \qquad
        p_{ij} \propto e^{-D_{ij}^2 / 2 w^2},\; q_{ij} \propto e^{f_i \cdot f_j / \tau} \\
    L_\text{layout} &= \text{the same with } q_{ij} \propto (1 + \hat D_{ij}^2 / w^2)^{-1}

Pairwise losses are computed in blocks of rows: memory is O(block * N), not O(N^2). In contexts of more than
``MAX_EXACT_CELLS`` cells that have a generator, they are estimated without bias from a random sample of the pairs (distance) or
of the cells i (neighbor, layout), in time linear in N. Other losses of distances, and their gradients, are in
:mod:`alphastomics.diffusion.distances`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from alphastomics.diffusion.distances import distance_loss, pairwise_distances
from alphastomics.diffusion.geometry import align

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from torch import Tensor

    from alphastomics.config import DistanceKind

    Similarity = Callable[[Tensor, Tensor], Tensor]  # (B, n, K), (B, N, K) -> logits (B, n, N)
    Loss = Callable[[slice, torch.Generator | None], Tensor]  # loss of contexts; from a sample, if given a generator

BLOCK = 1024  # rows of the pair matrix in memory at a time
MAX_EXACT_CELLS = 4096  # cells of a context in which all pairs take as long as the rest of a training step
N_PAIRS, N_ANCHORS = 2**20, 2048  # size of a sample of pairs, and of cells i
TEMPERATURE = 0.1  # of the similarity of features, tau in L_neighbor


def mean_squared_error(
    predicted: Tensor,
    true: Tensor,
    mask: Tensor,
    features: Tensor | None = None,
    entries: Tensor | None = None,
) -> Tensor:
    """Squared error per context, (B,), averaged over real cells and, if given, ``features`` (B, F) and ``entries`` (B, N, F).

    The error is 0 in a context where no entry is left.
    """
    error = F.mse_loss(predicted, true, reduction="none")
    share = mask.to(error.dtype).unsqueeze(-1)
    if features is not None:
        share = share * features.to(error.dtype).unsqueeze(1)
    if entries is not None:
        share = share * entries.to(error.dtype)
    count = share.expand_as(error).sum((1, 2))
    return (error * share).sum((1, 2)) / torch.where(count > 0, count, 1.0)


def aligned_error(predicted: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """Squared error per context, (B,), after ``true`` has been rotated or reflected onto ``predicted``."""
    return mean_squared_error(predicted, align(true, predicted.detach(), mask), mask)


def distance_error(
    predicted: Tensor,
    true: Tensor,
    mask: Tensor,
    rngs: Sequence[np.random.Generator] | None = None,
    *,
    kind: DistanceKind = "mse",
    clamp: float | None = None,
) -> Tensor:
    """Error of all pairwise distances per context, (B,), see :func:`~alphastomics.diffusion.distances.distance_loss`.

    With a generator for each context (``rngs``), the error of contexts of more than ``MAX_EXACT_CELLS`` cells is estimated from
    a sample of their pairs, except for ``"drmsd"``: the root of a sampled mean is biased.
    """

    def loss(rows: slice, generator: torch.Generator | None) -> Tensor:
        return distance_loss(
            predicted[rows],
            true[rows],
            mask[rows],
            kind=kind,
            clamp=clamp,
            n_pairs=N_PAIRS if generator and kind != "drmsd" else None,
            generator=generator,
        )

    return _exact_or_sampled(loss, mask, rngs)


def _exact_or_sampled(loss: Loss, mask: Tensor, rngs: Sequence[np.random.Generator] | None) -> Tensor:
    """Loss of every context, (..., B): exact, or from a sample if the context has many real cells."""
    if rngs is None or mask.shape[1] <= MAX_EXACT_CELLS:
        return loss(slice(None), None)
    parts = []
    for i, rng in enumerate(rngs):
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        parts.append(loss(slice(i, i + 1), generator if bool(mask[i].sum() > MAX_EXACT_CELLS) else None))
    return torch.cat(parts, dim=-1)


class Neighborhood(NamedTuple):
    """Which cells are neighbors of each other, to be compared with the tissue.

    Attributes
    ----------
    value
        A vector for each cell, (B, N, K).
    similarity
        Function from vectors (B, n, K) and (B, N, K) to logits (B, n, N).
    width
        Width of the neighborhood in the tissue, in model units.
    """

    value: Tensor
    similarity: Similarity
    width: float


def by_features(feature: Tensor, width: float) -> Neighborhood:
    r"""Neighbors by the directions of vectors (B, N, K), as in :math:`L_\text{neighbor}`."""
    value = F.normalize(feature.float(), dim=-1)
    return Neighborhood(value, lambda rows, cells: (rows / TEMPERATURE) @ cells.transpose(1, 2), width)


def by_positions(predicted: Tensor, width: float) -> Neighborhood:
    r"""Neighbors by predicted positions (B, N, D) in model units, as in :math:`L_\text{layout}`.

    The prediction has the heavy-tailed kernel of t-SNE (van der Maaten & Hinton 2008): the loss depends on which cells are
    neighbors, and little on the distances between groups of cells. ``width`` is the width on both sides.
    """

    def similarity(rows: Tensor, cells: Tensor) -> Tensor:
        norms = (rows**2).sum(-1, keepdim=True) + (cells**2).sum(-1)[:, None, :]
        return -torch.baddbmm(norms, rows, cells.mT, alpha=-2).clamp_min(0).log1p()

    return Neighborhood(predicted.float() / width, similarity, width)


def neighborhood_errors(
    neighborhoods: Sequence[Neighborhood],
    true: Tensor,
    mask: Tensor,
    rngs: Sequence[np.random.Generator] | None = None,
) -> Tensor:
    """Cross-entropies per neighborhood and context, (L, B), between nearness in the tissue and the predicted neighborhoods.

    Parameters
    ----------
    neighborhoods
        L predictions.
    true
        Positions (B, N, D) in model units, whose distances are computed once for all of them.
    mask
        Real cells (B, N).
    rngs
        A generator for each context. The errors of contexts of more than ``MAX_EXACT_CELLS`` cells are estimated from a sample of
        their cells.
    """
    n = mask.shape[1]
    n_rows = min(BLOCK, max(1, BLOCK * MAX_EXACT_CELLS // (max(1, n) * len(neighborhoods))))

    def loss(contexts: slice, generator: torch.Generator | None) -> Tensor:
        y, real = true[contexts], mask[contexts]
        here = [each._replace(value=each.value[contexts]) for each in neighborhoods]
        if generator is None:
            anchors, count = torch.arange(n, device=true.device), real.sum(1).clamp_min(1)
        else:  # the chosen cells do not depend on the amount of padding
            order = torch.rand(n, generator=generator).to(true.device).masked_fill(~real[0], -1.0)
            anchors, count = order.topk(N_ANCHORS).indices, real.new_full((1,), N_ANCHORS, dtype=torch.int64)
        blocks = anchors.split(n_rows)
        if len(blocks) == 1:
            return _neighborhood_block(here, y, real, anchors) / count
        total = here[0].value.new_zeros(len(here), len(y))
        for rows in blocks:
            total = total + checkpoint(_neighborhood_block, here, y, real, rows, use_reentrant=False)
        return total / count

    with torch.autocast(true.device.type, enabled=False):
        return _exact_or_sampled(loss, mask, rngs)


def _neighborhood_block(neighborhoods: Sequence[Neighborhood], true: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """Sums (L, B) of the cross-entropies of some ``rows``."""
    excluded = (torch.arange(true.shape[1], device=true.device) == rows[:, None]) | ~mask[:, None, :]
    # p and q are 0 at the floor, and 0 times it is 0
    floor = torch.zeros_like(excluded, dtype=torch.float32).masked_fill_(excluded, torch.finfo(torch.float32).min / 4)
    compared = mask.index_select(1, rows) & (mask.sum(1, keepdim=True) > 1)
    squared = pairwise_distances(true.index_select(1, rows), true).square_()
    share: dict[float, Tensor] = {}
    sums = []
    for value, similarity, width in neighborhoods:
        if width not in share:
            share[width] = (squared / (-2 * width**2)).add_(floor).softmax(-1)
        log_q = (similarity(value.index_select(1, rows), value) + floor).log_softmax(-1)
        sums.append(-((share[width] * log_q).sum(-1) * compared).sum(1))
    return torch.stack(sums)
