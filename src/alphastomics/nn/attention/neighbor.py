r"""Attention over the neighbours of a cell, which knows how far away each one lies, and how far in an order.

.. math::

    s_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_h}} + w \cdot e_{ij} + u_i \cdot u'_j, \qquad
    A_{ij} = \operatorname*{softmax}_{j \in \mathcal N_i \cup \{i\}} s_{ij}, \qquad
    o_i = \sum_j A_{ij} v_j, \qquad \bar e_i = \sum_j A_{ij} e_{ij}

per head. u and u' are factors of what features of pairs say, where there are some; they are further columns of q, k and v,
see :class:`~alphastomics.nn.attention.geometric.PairColumns`. The features of an edge are bumps over the logarithm of its length, and over the signed difference in the order
where there is one:

.. math::

    e_{ij} = \Big[\, \tau\, \phi\big(\tfrac12 \log(\lVert x_i - x_j \rVert^2 + \epsilon^2)\big),\;
    \phi\big(\operatorname{asinh}(r_j - r_i)\big) \Big], \qquad \phi_m(u) = e^{-(u - \mu_m)^2 / 2 \delta^2}

with centres :math:`\mu` that lie :math:`\delta` apart (radial functions: Schütt et al. 2017). Neighbours are told apart by
the ratio of their distances, however dense the cells lie, and motions and reflections of the slice change nothing.
:math:`\tau` is the trust in positions.

Time is O(N K), memory O(N): keys, values and features of edges are gathered for one block of cells at a time, and again on
the way back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from alphastomics.nn.attention.geometric import PairColumns
from alphastomics.nn.attention.softmax import GateType, SoftmaxAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from alphastomics.nn.geometry import Geometry

BLOCK = {"cpu": 2**22, "cuda": 2**26}  # entries of the keys and values that are gathered at the same time


class Block(NamedTuple):
    """S cells with what has been gathered of their K neighbours and, last, of themselves; in at least 32 bits.

    Attributes
    ----------
    valid
        False (S, K + 1) where there is no neighbour.
    query
        q, (H, S, F); F = d_h, and the rank of the features of pairs where there are some.
    place
        Position, place in the order and trust, (S, D + 2).
    key, value
        k and v of the neighbours, (H, S, K + 1, F).
    other_place
        Places of the neighbours, (S, K + 1, D + 2).
    """

    valid: Tensor
    query: Tensor
    place: Tensor
    key: Tensor
    value: Tensor
    other_place: Tensor


class Graph(NamedTuple):
    """All cells of a batch in one row of M = B N, and the edges between them.

    Attributes
    ----------
    other
        Neighbours (M, K + 1), last the cell itself, which also stands where there are fewer.
    valid, query, place
        As in :class:`Block`, for all cells.
    key, value
        k and v, (H, M, F).
    """

    other: Tensor
    valid: Tensor
    query: Tensor
    place: Tensor
    key: Tensor
    value: Tensor

    def blocks(self) -> Iterator[slice]:
        """Cells in blocks that can be gathered."""
        n, degree = self.other.shape
        gathered = 2 * degree * self.key[:, :1].numel()
        size = max(1, BLOCK.get(self.other.device.type, BLOCK["cuda"]) // gathered)
        if isinstance(self.other, FakeTensor):  # for an estimate of memory one block is as good as all
            n = min(n, size)
        return (slice(start, start + size) for start in range(0, n, size))

    def gathered(self, rows: slice | Tensor) -> Block:
        """Some cells with their neighbours."""
        other, wide = self.other[rows], self.place.dtype
        key, value, place = (
            table.index_select(-2, other.flatten()).unflatten(-2, other.shape).to(wide)
            for table in (self.key, self.value, self.place)
        )
        return Block(self.valid[rows], self.query[:, rows].to(wide), self.place[rows], key, value, place)


class NeighborAttention(SoftmaxAttention):
    """Multi-head attention of every cell over its neighbours and itself.

    Parameters
    ----------
    d_model, n_heads, gate_type, use_qk_norm
        As in :class:`~alphastomics.nn.SoftmaxAttention`; gates act on o alone.
    sequence
        Whether the cells have an order.
    n_bumps
        M, at least 2, of distances; one more of places in the order, so that an even M puts one at 0.
    distances
        First and last centre of distances, in model units; the first is also epsilon.
    longest
        Last centre of differences in the order.
    n_pair_channels
        C, channels of the pair features; 0 if there are none.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate_type: GateType = "headwise",
        use_qk_norm: bool = True,
        sequence: bool = False,
        n_bumps: int = 16,
        distances: tuple[float, float] = (0.004, 4.0),
        longest: float = 100.0,
        n_pair_channels: int = 0,
    ) -> None:
        super().__init__(d_model, n_heads, gate_type=gate_type, use_qk_norm=use_qk_norm)
        self.sequence, self.n_bumps, self.distances, self.longest = sequence, n_bumps, distances, longest
        n_features = 2 * n_bumps + 1 if sequence else n_bumps
        self.edge = nn.Linear(n_features, n_heads, bias=False)  # w
        self.pair_columns = PairColumns(n_heads, n_pair_channels, "factor") if n_pair_channels else None
        self.seen = nn.Linear(n_heads * (n_features + n_pair_channels), d_model, bias=False)

    def forward(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Attend.

        Parameters
        ----------
        x
            Features (B, N, d).
        geometry
            Neighbours, positions, an order of the cells where one is used, and features of pairs where they are read.
        mask
            Real cells (B, N); the others are attended by nobody and come out as 0.

        Returns
        -------
        (B, N, d).

        Raises
        ------
        ValueError
            If there are no neighbours, or no order or features of pairs where they are used.
        """
        b, n, d = x.shape
        graph = self._graph(x, geometry, mask)
        with torch.autocast(x.device.type, enabled=False):
            o, seen = _OverBlocks.apply(self._attend, self.edge.weight, *graph)
        o, seen = o.view(b, n, self.n_heads, -1), seen.reshape(b, n, -1)
        if self.pair_columns is not None and geometry.pairs is not None:
            mixed = o[..., self.d_head :].transpose(1, 2)
            seen = torch.cat([seen, self.pair_columns.read(geometry.pairs, mixed)], dim=-1)
        o = o[..., : self.d_head].to(graph.value.dtype)
        gates = self.gates(x)
        if gates is not None:
            o = o * gates.view(b, n, self.n_heads, -1)
        y = self.out(o.reshape(b, n, d)) + self.seen(seen.to(x.dtype))
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)

    def _graph(self, x: Tensor, geometry: Geometry, mask: Tensor | None) -> Graph:
        q, k, v = self.heads(x)
        if self.pair_columns is not None:
            if geometry.pairs is None:
                raise ValueError("this attention reads features of pairs, and there are none; take n_pair_channels=0")
            left, right = self.pair_columns.columns(geometry.pairs, q.dtype)
            q, k, v = torch.cat([q, self.d_head**0.5 * left], -1), torch.cat([k, right], -1), torch.cat([v, right], -1)
        q, k, v = (part.transpose(0, 1).flatten(1, 2) for part in (q, k, v))
        position = geometry.centred(x, mask, 1 if geometry.position is None else geometry.position.shape[-1])
        order = torch.zeros_like(position[..., :1])
        if self.sequence:
            if geometry.sequence is None:
                raise ValueError("sequence=True needs the order of the cells, and there is none")
            order = geometry.sequence[..., None].to(position.dtype)
            order = order if mask is None else order.masked_fill(~mask[..., None], 0.0)
        trust = geometry.trusted(x)[:, None, None].expand_as(order)
        place = torch.cat([position, order, trust], dim=-1).flatten(0, 1)
        return Graph(*_edges(x, geometry, mask), q, place, k, v)

    def _attend(self, block: Block, w: Tensor) -> tuple[Tensor, Tensor]:
        """Means of v, (S, H, F), and of the features of the edges, (S, H, E)."""
        a, e = self._weigh(block, w)
        return (a[:, :, None] @ block.value)[:, :, 0].transpose(0, 1), a.transpose(0, 1) @ e

    def _weigh(self, block: Block, w: Tensor) -> tuple[Tensor, Tensor]:
        """Attention (H, S, K + 1), and the features of the edges (S, K + 1, E)."""
        with torch.autocast(w.device.type, enabled=False):
            e = self._features(block.place[:, None], block.other_place)
            score = (block.key @ block.query[..., None])[..., 0] / self.d_head**0.5
            score = score + (e @ w.to(e.dtype).T).permute(2, 0, 1)
        return score.masked_fill(~block.valid, float("-inf")).softmax(dim=-1), e

    def _features(self, place: Tensor, other: Tensor) -> Tensor:
        """Features (S, K + 1, E) of edges between cells at ``place`` (S, 1, D + 2) and ``other`` (S, K + 1, D + 2)."""
        difference = other - place
        shortest, furthest = self.distances
        log_distance = 0.5 * (difference[..., :-2].square().sum(dim=-1) + shortest**2).log()
        e = place[..., -1:] * _bumps(log_distance, math.log(shortest), math.log(furthest), self.n_bumps)
        if not self.sequence:
            return e
        last = math.asinh(self.longest)
        return torch.cat([e, _bumps(difference[..., -2].asinh(), -last, last, self.n_bumps + 1)], dim=-1)

    def weights(  # type: ignore[override]
        self, x: Tensor, rows: Tensor, geometry: Geometry, mask: Tensor | None = None
    ) -> Tensor:
        """Rows (R,) of the attention matrix, (B, H, R, N), 0 where cells are not neighbours."""
        b, n, _ = x.shape
        graph = self._graph(x, geometry, mask)
        rows = (torch.arange(b, device=x.device)[:, None] * n + rows).flatten()
        a, _ = self._weigh(graph.gathered(rows), self.edge.weight)
        dense = a.new_zeros(self.n_heads, len(rows), n)
        dense = dense.scatter_add(2, (graph.other[rows] % n).expand_as(a), a)
        return dense.view(self.n_heads, b, -1, n).transpose(0, 1)

    def received(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Mean attention that each cell receives from the real ones, (B, H, N)."""
        b, n, _ = x.shape
        graph = self._graph(x, geometry, mask)
        real = torch.ones(b, n, dtype=torch.bool, device=x.device) if mask is None else mask
        total = graph.place.new_zeros(self.n_heads, b * n)
        for rows in graph.blocks():
            a, _ = self._weigh(graph.gathered(rows), self.edge.weight)
            a = a * real.flatten()[rows, None]
            total = total.index_add(1, graph.other[rows].flatten(), a.flatten(1))
        return total.view(-1, b, n).transpose(0, 1) / real.sum(dim=1)[:, None, None].clamp_min(1)


class _OverBlocks(torch.autograd.Function):
    """A function of blocks of cells, block after block, and once more on the way back.

    Gradients of keys and values add up in one place, which a graph over the blocks would hold once for each of them.
    """

    @staticmethod
    def forward(
        ctx: Any, attend: Callable[[Block, Tensor], tuple[Tensor, Tensor]], w: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        graph = Graph(*tensors)
        ctx.attend = attend
        ctx.save_for_backward(w, *graph)
        results: tuple[Tensor, ...] = ()
        for rows in graph.blocks():
            parts = attend(graph.gathered(rows), w)
            results = results or tuple(part.new_empty(len(graph.other), *part.shape[1:]) for part in parts)
            for result, part in zip(results, parts, strict=True):
                result[rows] = part
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        w, *tensors = ctx.saved_tensors
        graph, places = Graph(*tensors), ctx.needs_input_grad[5]
        of_w, of_query, of_place, of_key, of_value = (
            torch.zeros_like(tensor, dtype=graph.place.dtype) for tensor in (w, *graph[2:])
        )
        for rows in graph.blocks():
            other = graph.other[rows].flatten()
            block = graph.gathered(rows)
            leaves = [tensor.detach() for tensor in (w.to(graph.place.dtype), *block[1:])]
            for leaf, differs in zip(leaves, (True, True, places, True, True, places), strict=True):
                leaf.requires_grad_(differs)
            with torch.enable_grad(), torch.autocast(w.device.type, enabled=False):
                result = ctx.attend(Block(block.valid, *leaves[1:]), leaves[0])
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = torch.autograd.grad(result, wanted, [gradient[rows] for gradient in gradients])
            of_w += found[0]
            of_query[:, rows] = found[1]
            of_key.index_add_(1, other, found[-2 - places].flatten(1, 2))
            of_value.index_add_(1, other, found[-1 - places].flatten(1, 2))
            if places:
                of_place[rows] += found[2]
                of_place.index_add_(0, other, found[-1].flatten(0, 1))
        sums = zip((w, *graph[2:]), (of_w, of_query, of_place, of_key, of_value), strict=True)
        found_w, *rest = (total.to(tensor.dtype) for tensor, total in sums)
        return None, found_w, None, None, *rest


def _edges(x: Tensor, geometry: Geometry, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of the neighbours in all B N cells, and which are valid, both (B N, K + 1)."""
    b, n, _ = x.shape
    if geometry.neighbours is None:
        raise ValueError("attention over neighbours needs them; see alphastomics.nn.neighbours.neighbor_pairs")
    itself = torch.arange(n, device=x.device).expand(b, n)[..., None]
    valid = (geometry.neighbours >= 0) & (geometry.neighbours != itself)
    other = torch.where(valid, geometry.neighbours, itself)
    if mask is not None:
        valid = valid & mask.gather(1, other.flatten(1)).view_as(other)
    other = torch.cat([other, itself], dim=-1) + n * torch.arange(b, device=x.device)[:, None, None]
    return other.flatten(0, 1), torch.cat([valid, torch.ones_like(itself, dtype=torch.bool)], dim=-1).flatten(0, 1)


def _bumps(u: Tensor, low: float, high: float, n: int) -> Tensor:
    """Features phi (..., n) of numbers (...), with centres from ``low`` to ``high``."""
    centres = torch.linspace(low, high, n, dtype=u.dtype, device=u.device)
    return torch.exp(-0.5 * ((u[..., None] - centres) * ((n - 1) / (high - low))).square())
