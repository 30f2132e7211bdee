r"""Training losses of the two modalities, each averaged over what is really there.

.. math::

    L_\text{mse} &= \frac{\sum_i m_i w\,\lVert x_i - \hat x_i\rVert^2}{D \sum_i m_i} \\
    L_\text{distance} &= \frac{1}{n(n-1)} \sum_{i \ne j} (D_{ij} - \hat D_{ij})^2, \qquad D_{ij} = \lVert x_i - x_j\rVert \\
    L_\text{aligned} &= L_\text{mse}(x R^\star, \hat x), \qquad R^\star = \text{Kabsch}(x, \hat x) \\
    L_\text{neighbour} &= -\frac1n \sum_i \sum_{j \ne i} p_{ij} \log q_{ij}, \qquad
        p_{ij} \propto e^{-D_{ij}^2 / 2 w^2},\; q_{ij} \propto e^{f_i \cdot f_j / \tau} \\
    L_\text{layout} &= \text{the same with } q_{ij} \propto (1 + \hat D_{ij}^2 / w^2)^{-1}

The pairwise losses visit the pairs in blocks of rows: memory is O(block * N), not O(N^2). Other losses of distances, and
the gradient of this one, are in ``distances.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from alphastomics.diffusion.distances import distance_loss, pairwise_distances
from alphastomics.diffusion.geometry import align

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Similarity = Callable[[Tensor, Tensor], Tensor]  # (B, n, K), (B, N, K) -> logits (B, n, N)

BLOCK = 1024  # rows of the pair matrix that are in memory at once


def mean_squared_error(
    predicted: Tensor,
    true: Tensor,
    mask: Tensor,
    weight: Tensor | None = None,
    features: Tensor | None = None,
    entries: Tensor | None = None,
) -> Tensor:
    """Squared error per context, (B,), averaged over real cells.

    If given, over measured ``features`` (B, F) of them, and over chosen ``entries`` (B, N, F); 0 where none is left.
    """
    error = (predicted - true) ** 2
    share = mask.to(error.dtype).unsqueeze(-1)
    if features is not None:
        share = share * features.to(error.dtype).unsqueeze(1)
    if entries is not None:
        share = share * entries.to(error.dtype)
    count = share.expand_as(error).sum((1, 2)).clamp_min(1)
    loss = (error * share).sum((1, 2)) / count
    return loss if weight is None else loss * weight


def aligned_error(predicted: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """Squared error per context, (B,), after ``true`` has been rotated or reflected onto ``predicted``."""
    return mean_squared_error(predicted, align(true, predicted.detach(), mask), mask)


def distance_error(predicted: Tensor, true: Tensor, mask: Tensor) -> Tensor:
    """Mean squared difference of all pairwise distances per context, (B,); zero for fewer than two cells."""
    return distance_loss(predicted, true, mask)


def _neighbour_block(
    value: Tensor, true: Tensor, mask: Tensor, start: int, width: float, similarity: Similarity
) -> Tensor:
    rows = slice(start, start + BLOCK)
    n_rows, n = value[:, rows].shape[1], value.shape[1]
    number = torch.arange(n, device=value.device)
    hidden = (number == number[start : start + n_rows, None]) | ~mask[:, None, :]
    floor = torch.finfo(torch.float32).min / 4
    log_q = similarity(value[:, rows], value).masked_fill(hidden, floor).log_softmax(-1)
    closeness = (-(pairwise_distances(true[:, rows], true) ** 2) / (2 * width**2)).masked_fill(hidden, floor)
    cross_entropy = -(closeness.softmax(-1) * log_q.masked_fill(hidden, 0.0)).sum(-1)
    return (cross_entropy * mask[:, rows]).sum(1)


def _neighbour_cross_entropy(
    value: Tensor, true: Tensor, mask: Tensor, *, width: float, similarity: Similarity
) -> Tensor:
    total = value.new_zeros(len(value))
    blocked = value.shape[1] > BLOCK
    for start in range(0, value.shape[1], BLOCK):
        arguments = (value, true, mask, start, width, similarity)
        total = total + (
            checkpoint(_neighbour_block, *arguments, use_reentrant=False) if blocked else _neighbour_block(*arguments)
        )
    return total / mask.sum(1).clamp_min(1)


def neighbour_error(feature: Tensor, true: Tensor, mask: Tensor, *, width: float, temperature: float = 0.1) -> Tensor:
    """Cross-entropy per context, (B,), between nearness in the tissue and similarity of ``feature`` (B, N, K).

    Parameters
    ----------
    feature
        One vector per cell; only its direction counts.
    true
        Positions (B, N, D) in model units.
    mask
        Real cells (B, N).
    width
        Standard deviation of the neighbourhood, in model units.
    temperature
        Temperature of the similarity.
    """

    def similarity(rows: Tensor, cells: Tensor) -> Tensor:
        return rows @ cells.transpose(1, 2) / temperature

    return _neighbour_cross_entropy(
        F.normalize(feature.float(), dim=-1), true, mask, width=width, similarity=similarity
    )


def layout_error(predicted: Tensor, true: Tensor, mask: Tensor, *, width: float) -> Tensor:
    """Cross-entropy per context, (B,), between nearness in the tissue and nearness of the ``predicted`` positions.

    The heavy-tailed kernel of t-SNE (van der Maaten & Hinton 2008) on the predicted side: who is whose neighbour
    counts, however far away a whole group has been placed.

    Parameters
    ----------
    predicted, true
        Positions (B, N, D) in model units.
    mask
        Real cells (B, N).
    width
        Width of the neighbourhood on both sides, in model units.
    """

    def similarity(rows: Tensor, cells: Tensor) -> Tensor:
        squared = (rows**2).sum(-1, keepdim=True) + (cells**2).sum(-1)[:, None, :] - 2 * rows @ cells.transpose(1, 2)
        return -torch.log1p(squared.clamp_min(0) / width**2)

    with torch.autocast(predicted.device.type, enabled=False):
        return _neighbour_cross_entropy(predicted.float(), true, mask, width=width, similarity=similarity)
