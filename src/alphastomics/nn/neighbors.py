r"""Neighbors of cells, nearest in space or nearest in an order of the cells.

.. math::

    \mathcal N_i = \operatorname*{k\,nearest}_{j \ne i} \lVert x_i - x_j \rVert \;\cup\;
    \operatorname*{k\,nearest}_{j \ne i} |r_i - r_j|

with positions x and ranks r in the order. A search tree finds them in O(N log N) on a CPU. A GPU computes distances in blocks of
rows, for contexts in which this is faster than the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.spatial import cKDTree

if TYPE_CHECKING:
    from torch import Tensor
BLOCK = 2**26  # distances in memory at a time on a GPU
MAX_BRUTE_FORCE = 2**30  # distances above which a tree on the CPU is faster than a GPU


def nearest_neighbors(x: Tensor, k: int) -> Tensor:
    """Indices (N, k) of the k nearest other cells of ``x`` (N, D), nearest first; all N - 1 if k is larger."""
    return _nearest_others(x.detach(), min(k, len(x) - 1))


def neighbor_pairs(position: Tensor, mask: Tensor | None = None, *, k: int) -> Tensor:
    """Nearest cells in space.

    Parameters
    ----------
    position
        (B, N, D), finite where ``mask`` is true.
    mask
        Real cells (B, N); None if all are.
    k
        Number of neighbors.

    Returns
    -------
    Indices (B, N, k) of other cells in the same context, nearest first; -1 for none and for padding.
    """
    mask = torch.ones(position.shape[:2], dtype=torch.bool, device=position.device) if mask is None else mask
    result = torch.full((*mask.shape, k), -1, device=mask.device)
    for context, real in enumerate(mask):
        cells = real.nonzero()[:, 0]
        rows = _nearest_others(position[context].detach()[cells], k)
        result[context, cells] = torch.where(rows >= 0, cells[rows.clamp_min(0)], -1)
    return result


def sequence_pairs(sequence: Tensor, position: Tensor, mask: Tensor, *, k: int) -> Tensor:
    """Nearest cells in an order, by rank.

    Parameters
    ----------
    sequence
        A real index (B, N) that orders the cells.
    position
        (B, N, D), which breaks ties of the index; equal positions are in the order of the rows.
    mask
        Real cells (B, N).
    k
        Number of neighbors, half of them on either side if there are enough.

    Returns
    -------
    Indices (B, N, k) of other cells in the same context, in ascending order; -1 for none and for padding.
    """
    result = torch.full((*mask.shape, k), -1, device=mask.device)
    for context, real in enumerate(mask):
        cells = real.nonzero()[:, 0]
        x = position[context].detach()[cells]
        rows = _nearest_ranks(lexicographic_order(*x.T.flip(0), sequence[context].detach()[cells]), k)
        result[context, cells] = torch.where(rows >= 0, cells[rows.clamp_min(0)], -1)
    return result


# A custom operator, because a search tree cannot run on fake tensors, for which only the shape of the result is needed.
@torch.library.custom_op(
    "alphastomics::noisy_neighbors",
    mutates_args=(),
    schema="(Tensor position, Tensor known, Tensor? sequence, Tensor real, int k, str kind) -> Tensor",
)
def noisy_neighbors(
    position: Tensor, known: Tensor, sequence: Tensor | None, real: Tensor, k: int, kind: str
) -> Tensor:
    """Neighbors of cells, some of whose positions are unknown.

    Parameters
    ----------
    position
        (B, N, D), finite.
    known
        Cells (B, N) with a known position; only these are neighbors in space.
    sequence
        A real index (B, N) that orders the cells; None only for ``"coordinate"``.
    real
        Real cells (B, N); all of these are neighbors in the order.
    k
        Number of neighbors.
    kind
        ``"coordinate"``: nearest in space, see :func:`neighbor_pairs`; ``"sequence"``: nearest in the order, see
        :func:`sequence_pairs`; ``"hybrid"``: half of them in space and the rest in the order, in ascending order.

    Returns
    -------
    Indices (B, N, k) of other cells in the same context, -1 for none and for padding.
    """
    if kind == "coordinate":
        return neighbor_pairs(position, known, k=k)
    assert sequence is not None
    in_space = {"sequence": 0, "hybrid": k // 2}[kind]
    along = sequence_pairs(sequence, position, real, k=k - in_space)
    if not in_space:
        return along
    near = neighbor_pairs(position, known, k=in_space)
    return _union(torch.cat([near, along], dim=2).flatten(0, 1)).view(*real.shape, k)


@noisy_neighbors.register_fake
def _(position: Tensor, known: Tensor, sequence: Tensor | None, real: Tensor, k: int, kind: str) -> Tensor:
    return known.new_empty(*known.shape, k, dtype=torch.int64)


def lexicographic_order(*keys: Tensor) -> Tensor:
    """Indices (..., N) that sort by the last of ``keys`` (..., N); ties are broken by the previous keys, then by row."""
    order = keys[0].argsort(dim=-1, stable=True)
    for key in keys[1:]:
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order


def _nearest(query: Tensor, x: Tensor, k: int) -> Tensor:
    """Indices (M, k) of the nearest points ``x`` (n, D) of ``query`` (M, D), nearest first; k is at most n."""
    if x.device.type == "cpu" or len(query) * len(x) > MAX_BRUTE_FORCE:
        return _nearest_in_tree(query, x, k)
    return _nearest_in_blocks(query, x, k)


def _nearest_in_tree(query: Tensor, x: Tensor, k: int) -> Tensor:
    points = query.cpu().double().numpy()
    order = cKDTree(points).indices  # successive queries of close points visit the same branches
    rows = np.empty((len(points), k), dtype=np.int64)
    tree = cKDTree(x.cpu().double().numpy())
    _, rows[order] = tree.query(points[order], k=range(1, k + 1), workers=torch.get_num_threads())
    return torch.from_numpy(rows).to(x.device)


def _nearest_in_blocks(query: Tensor, x: Tensor, k: int) -> Tensor:
    rows = []
    with torch.autocast(x.device.type, enabled=False):
        for part in query.split(max(1, BLOCK // len(x))):
            # The default mode, a matrix product, has errors of 1e-2 for close points.
            distance = torch.cdist(part, x, compute_mode="donot_use_mm_for_euclid_dist")
            rows.append(distance.topk(k, largest=False).indices)
    return torch.cat(rows)


def _nearest_others(x: Tensor, k: int) -> Tensor:
    """Indices (n, k) of the nearest other points, nearest first, -1 for none."""
    n = len(x)
    rows = torch.full((n, k), -1, device=x.device)
    found = min(k, n - 1)
    if found > 0:
        candidates = _nearest(x, x, found + 1)
        itself = candidates == torch.arange(n, device=x.device)[:, None]
        itself[:, -1] |= ~itself.any(dim=1)  # the cell is missing from k + 1 duplicates
        rows[:, :found] = candidates[~itself].view(n, found)
    return rows


def _nearest_ranks(order: Tensor, k: int) -> Tensor:
    """Indices (n, k) of the nearest other cells in ``order`` (n,), ascending, -1 for none."""
    n = len(order)
    if n == 0:
        return order.new_empty(0, k)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(n, device=order.device)
    first = (rank - k // 2).clamp(max=n - 1 - k).clamp(min=0)  # one-sided at the ends of the order
    candidates = first[:, None] + torch.arange(k + 1, device=order.device)
    valid = (candidates < n) & (candidates != rank[:, None])
    return _union(torch.where(valid, order[candidates.clamp(max=n - 1)], -1))[:, :k]


def _union(rows: Tensor) -> Tensor:
    """Distinct indices (n, K) of every row in ascending order, then -1."""
    missing = len(rows)
    rows = rows.masked_fill(rows < 0, missing).sort(dim=1).values
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = missing
    rows = rows.sort(dim=1).values
    return rows.masked_fill(rows == missing, -1)
