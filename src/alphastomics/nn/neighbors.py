r"""Neighbors of cells: nearest in space, nearest in an order of the cells, and random distant ones.

.. math::

    \mathcal N_i = \operatorname*{k\,nearest}_{j \ne i} \lVert x_i - x_j \rVert \;\cup\;
    \operatorname*{k\,nearest}_{j \ne i} |r_i - r_j| \;\cup\; \{j : 0 < |r_i - r_j| \le w\} \;\cup\; \text{random}

r is the rank of a cell in the order. Random neighbors are drawn with a probability that falls as :math:`1 / d^3` beyond
the k nearest (as in SALAD, Jendrusch & Korbel 2025), so that any two cells are connected by a few edges. At uniform density in D
dimensions the m-th nearest cell lies at :math:`d \sim m^{1/D}`, so that the probability is :math:`m^{-3/D}` in ranks. It is
sampled without an N x N matrix: the nearest member of a random share :math:`\rho` of the cells has rank m with
probability :math:`\rho (1 - \rho)^{m - 1}`, and

.. math::

    \int \rho (1 - \rho)^{m - 1} f(\rho)\, d\rho \;\sim\; m^{-3 / D}
    \qquad \text{for } f(\rho) \propto \rho^{3 / D - 2}, \quad \tfrac2n \le \rho \le \tfrac{1}{k + 1}

(Yule 1925; Simon 1955). Each random neighbor has its own share; shares are stratified under f. A share is a
group, chosen at random for each cell, of a random partition of the cells into groups of equal size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.spatial import cKDTree

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from alphastomics.config import PairKind


BLOCK = 2**26  # distances in memory at a time on a GPU
MANY = 2**30  # distances above which a tree on the CPU is faster than a GPU


def nearest_neighbors(x: Tensor, k: int) -> Tensor:
    """Indices (N, k) of the k nearest other cells of ``x`` (N, D), nearest first; all N - 1 if k is larger."""
    return _nearest_others(x.detach(), min(k, len(x) - 1))


def neighbor_pairs(
    position: Tensor | None,
    mask: Tensor | None = None,
    *,
    k: int,
    kind: PairKind = "coordinate",
    sequence: Tensor | None = None,
    window: int = 0,
    n_random: int = 0,
    include_self: bool = False,
    generator: Generator | None = None,
) -> Tensor:
    """Distinct neighbors of every cell, without padding.

    Parameters
    ----------
    position
        (B, N, D), finite where ``mask`` is true; None only if ``kind="sequence"`` and ``n_random=0``.
    mask
        Real cells (B, N); None if all are.
    k
        Number of nearest cells.
    kind
        ``"coordinate"``: nearest in space; ``"sequence"``: nearest in the order; ``"hybrid"``: half of them in space and the
        rest in the order.
    sequence
        A real index (B, N) that orders the cells; ties are broken by position, then by row.
    window
        w: cells at most w ranks away are neighbors, too. Needs ``sequence``.
    n_random
        Random neighbors per cell; those that are neighbors already are dropped. Needs ``position``.
    include_self
        Whether a cell is its own neighbor.
    generator
        Generator of the random neighbors, on the CPU.

    Returns
    -------
    Indices (B, N, K) of cells in the same context, -1 for none and for padding: nearest first if all are nearest in space, else
    in ascending order.

    Raises
    ------
    ValueError
        If ``kind`` is unknown, or a position or sequence that is needed is missing.
    """
    kinds = {"coordinate": (k, 0), "sequence": (0, k), "hybrid": (k // 2, k - k // 2)}
    if kind not in kinds:
        raise ValueError(f"kind={kind!r} is unknown; choose from {sorted(kinds)}")
    near, along = kinds[kind]
    if position is None and (near or n_random):
        raise ValueError(f"kind={kind!r} with n_random={n_random} needs positions")
    if sequence is None and (along or window):
        raise ValueError(f"kind={kind!r} with window={window} needs a sequence")
    like = position if position is not None else sequence
    assert like is not None  # one of both is needed
    mask = torch.ones(like.shape[:2], dtype=torch.bool, device=like.device) if mask is None else mask
    width = include_self + near + max(along, 2 * window) + n_random  # both ranges of ranks are centered at the cell
    result = torch.full((*mask.shape, width), -1, device=mask.device)
    for b in range(len(mask)):
        real = mask[b].nonzero()[:, 0]
        x = None if position is None else position[b].detach()[real]
        sets = [torch.arange(len(real), device=real.device)[:, None]] if include_self else []
        if x is not None and near:
            sets.append(_nearest_others(x, near))
        if sequence is not None and (along or window):
            sets.append(_along(_order(sequence[b].detach()[real], x), along, window))
        if x is not None and n_random:
            sets.append(_random_others(x, k, n_random, generator))
        rows = union(sets) if along or window or n_random else torch.cat(sets, dim=1)
        result[b, real] = torch.where(rows >= 0, real[rows.clamp_min(0)], -1)[:, :width]
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
    """Neighbors (B, N, k) as in :func:`neighbor_pairs`, if the positions of some real cells are unknown.

    Only ``known`` cells (B, N) are neighbors in space; all ``real`` cells (B, N) are neighbors in the order. ``position`` must
    be finite.
    """
    near = {"coordinate": k, "sequence": 0, "hybrid": k // 2}[kind]
    found = []
    if near:
        found.append(neighbor_pairs(position, known, k=near))
    if near < k:
        found.append(neighbor_pairs(position, real, k=k - near, kind="sequence", sequence=sequence))
    if len(found) == 1:
        return found[0]
    return union([rows.flatten(0, 1) for rows in found]).view(*real.shape, k)


@noisy_neighbors.register_fake
def _(position: Tensor, known: Tensor, sequence: Tensor | None, real: Tensor, k: int, kind: str) -> Tensor:
    return known.new_empty(*known.shape, k, dtype=torch.int64)


def lexicographic_order(*keys: Tensor) -> Tensor:
    """Indices (..., N) that sort by the last of ``keys`` (..., N); ties are broken by the previous keys, then by row."""
    order = keys[0].argsort(dim=-1, stable=True)
    for key in keys[1:]:
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order


def _order(sequence: Tensor, x: Tensor | None) -> Tensor:
    """Indices (n,) that sort by ``sequence``, then by position."""
    return lexicographic_order(*(() if x is None else x.T.flip(0)), sequence)


def _nearest(query: Tensor, x: Tensor, k: int) -> Tensor:
    """Indices (M, k) of the nearest points ``x`` (n, D) of ``query`` (M, D), nearest first; k is at most n."""
    if x.device.type == "cpu" or len(query) * len(x) > MANY:
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
        own = candidates == torch.arange(n, device=x.device)[:, None]
        own[:, -1] |= ~own.any(dim=1)  # the cell is missing from k + 1 duplicates
        rows[:, :found] = candidates[~own].view(n, found)
    return rows


def _along(order: Tensor, k: int, window: int) -> Tensor:
    """Indices (n, k + 2 window + 2) of the nearest cells in ``order`` (n,), -1 for none and for the cell itself."""
    n = len(order)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(n, device=order.device)
    first = (rank - k // 2).clamp(max=n - 1 - k).clamp(min=0)  # one-sided at the ends of the order
    nearest = first[:, None] + torch.arange(k + 1, device=order.device)
    around = rank[:, None] + torch.arange(-window, window + 1, device=order.device)
    wanted = torch.cat([nearest, around], dim=1)
    valid = (wanted >= 0) & (wanted < n) & (wanted != rank[:, None])
    return torch.where(valid, order[wanted.clamp(0, max(n - 1, 0))] if n else wanted, -1)


def _random_others(x: Tensor, k: int, n_random: int, generator: Generator | None) -> Tensor:
    """Indices (n, n_random) of random other points; all -1 if there are no others than the k nearest."""
    n, n_dims = x.shape
    rows = torch.full((n, n_random), -1, device=x.device)
    if n <= k + 1:
        return rows
    itself = torch.arange(n, device=x.device)
    apart = 2 * float((x.amax(dim=0) - x.amin(dim=0)).norm()) + 1  # further than any two cells
    for slot, u in enumerate(torch.rand(n_random, generator=generator, dtype=torch.float64).tolist()):
        size = max(2, round(n * _share((slot + u) / n_random, 2 / n, 1 / (k + 1), n_dims)))
        # Groups are separated along an additional axis, so that one search finds the nearest cell of a group for all cells.
        group = torch.randperm(n, generator=generator) % (n // size)
        wanted = torch.randint(n // size, (n,), generator=generator)
        members, cells = (torch.cat([x, apart * g[:, None].to(x)], dim=1) for g in (group, wanted))
        first, second = _nearest(cells, members, 2).T
        rows[:, slot] = torch.where(first == itself, second, first)
    return rows


def _share(u: float, low: float, high: float, n_dims: int) -> float:
    """Quantile u of the density f on [low, high], rho^(3 / D - 2)."""
    power = 3 / n_dims - 1
    if power == 0:
        return low * (high / low) ** u
    return (low**power + u * (high**power - low**power)) ** (1 / power)


def union(sets: list[Tensor]) -> Tensor:
    """Distinct indices (n, K) of all sets in ascending order, then -1."""
    rows = torch.cat(sets, dim=1)
    missing = len(rows)
    rows = rows.masked_fill(rows < 0, missing).sort(dim=1).values
    rows[:, 1:][rows[:, 1:] == rows[:, :-1]] = missing
    rows = rows.sort(dim=1).values
    return rows.masked_fill(rows == missing, -1)
