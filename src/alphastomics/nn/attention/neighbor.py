r"""Attention over the neighbors of a cell, with features of their distances in space and along an order.

.. math::

    s_{ij} = \frac{q_i \cdot k_j}{\sqrt{d_h}} + w \cdot e_{ij} + u_i \cdot u'_j, \qquad
    A_{ij} = \operatorname*{softmax}_{j \in \mathcal N_i \cup \{i\}} s_{ij}, \qquad
    o_i = \sum_j A_{ij} v_j, \qquad \bar e_i = \sum_j A_{ij} e_{ij}

per head. u and u' are factors of the bias from pair features, if there are any, and further columns of q, k and v
(:class:`~alphastomics.nn.attention.geometric.PairColumns`). The features of an edge are radial functions (Schütt et al. 2017) of
the logarithm of its length and, if the cells have an order, of the signed difference in the order:

.. math::

    e_{ij} = \Big[\, \tau\, \phi\big(\tfrac12 \log(\lVert x_i - x_j \rVert^2 + \epsilon^2)\big),\;
    \phi\big(\operatorname{asinh}(r_j - r_i)\big) \Big], \qquad \phi_m(u) = e^{-(u - \mu_m)^2 / 2 \delta^2}

with centers :math:`\mu` that are :math:`\delta` apart. Neighbors are distinguished by ratios of distances at any density of cells,
and features are invariant to motions and reflections of the slice. :math:`\tau` is the trust in positions.

Time is O(N K), memory O(N (d + H K)): keys and values are never gathered, see :mod:`alphastomics.nn.attention.edges`.
Attention and features of edges are computed for one block of cells at a time, and recomputed in the backward pass.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from alphastomics.config import NetworkConfig
from alphastomics.nn._torch_compat import FakeTensor
from alphastomics.nn.attention.edges import edge_products, edge_sums, returned_sums
from alphastomics.nn.attention.geometric import PairColumns
from alphastomics.nn.attention.softmax import SoftmaxAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from alphastomics.config import GateType
    from alphastomics.nn.geometry import Geometry

# Radial functions of distance; there is one more for the order, so that one center is 0.
N_BASIS = 16
DISTANCES = 0.004, 4.0  # first and last center for distances, in model units; the first is also epsilon
MAX_STEPS = 100.0  # last center for differences in the order
BLOCK = {"cpu": 2**20, "cuda": 2**26}  # entries of edge features and scores in memory at a time


class Graph(NamedTuple):
    """All cells of a batch, M = B N, and the edges from the S cells of this process.

    Attributes
    ----------
    target
        Ends (S, K + 1) of the edges, indices in 32 bits: K neighbors, replaced by the cell itself if there are fewer, and the
        cell itself.
    valid
        Whether an edge exists, (S, K + 1).
    query
        q, (H, S, F); F is d_h plus the rank of pair features, if any.
    local
        Position, index in the order and trust of the cells of this process, (S, D + 2), in at least 32 bits.
    coordinates
        The same for all cells, (M, D + 2).
    key, value
        k and v, (H, M, F).
    """

    target: Tensor
    valid: Tensor
    query: Tensor
    local: Tensor
    coordinates: Tensor
    key: Tensor
    value: Tensor

    def wide(self) -> Graph:
        """Convert q, k and v to the precision of the coordinates, with contiguous rows."""
        query, key, value = (
            part.to(self.coordinates.dtype).contiguous() for part in (self.query, self.key, self.value)
        )
        return self._replace(query=query, key=key, value=value)

    def blocks(self, w: Tensor) -> Iterator[slice]:
        """Blocks of cells, sized for edge features with weights ``w`` (H, n_features)."""
        n, degree = self.target.shape
        size = max(1, BLOCK.get(self.target.device.type, BLOCK["cuda"]) // (degree * sum(w.shape)))
        if isinstance(self.target, FakeTensor):  # one block suffices for an estimate of memory
            n = min(n, size)
        return (slice(start, start + size) for start in range(0, n, size))

    def ends(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Coordinates of the cells ``rows`` (S, 1, D + 2) and of the ends of their edges (S, K + 1, D + 2)."""
        target = self.target[rows]
        return self.local[rows][:, None], self.coordinates.index_select(0, target.flatten()).unflatten(0, target.shape)

    def attention(self, rows: slice | Tensor, bias: Tensor, d_head: int) -> Tensor:
        """Attention (H, S, K + 1) of the cells ``rows`` with ``bias`` (S, K + 1, H)."""
        score = edge_products(self.query[:, rows], self.key, self.target[rows])
        score.div_(d_head**0.5).add_(bias.permute(2, 0, 1)).masked_fill_(~self.valid[rows], float("-inf"))
        return score.softmax(dim=-1)


class NeighborAttention(SoftmaxAttention):
    """Multi-head attention of every cell over its neighbors and itself.

    Parameters
    ----------
    d_model, n_heads, gate_type, use_qk_norm
        As in :class:`~alphastomics.nn.SoftmaxAttention`; gates act on o alone.
    sequence
        Whether the cells have an order.
    n_pair_channels
        C, channels of the pair features; 0 without them.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        gate_type: GateType = NetworkConfig.gate_type,
        use_qk_norm: bool = NetworkConfig.use_qk_norm,
        sequence: bool = False,
        n_pair_channels: int = 0,
    ) -> None:
        super().__init__(d_model, n_heads, gate_type=gate_type, use_qk_norm=use_qk_norm)
        self.sequence = sequence
        n_features = 2 * N_BASIS + 1 if sequence else N_BASIS
        self.edge = nn.Linear(n_features, n_heads, bias=False)  # w
        self.pair_columns = PairColumns(n_heads, n_pair_channels) if n_pair_channels else None
        self.seen = nn.Linear(n_heads * (n_features + n_pair_channels), d_model, bias=False)

    def forward(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Map ``x`` (B, N, d) to (B, N, d), 0 for padding; see :class:`~alphastomics.nn.Attention`.

        ``geometry`` has neighbors, positions, and an order and pair features if these are used.

        Raises
        ------
        ValueError
            If neighbors, or an order or pair features that are used, are missing.
        """
        b, n, _ = x.shape
        graph = self._graph(x, geometry, mask)
        with torch.autocast(x.device.type, enabled=False):
            o, edges = _AlongEdges.apply(self._features, self.d_head, self.edge.weight, *graph)
        o, edges = o.transpose(0, 1).unflatten(0, (b, n)), edges.reshape(b, n, -1)
        if self.pair_columns is not None and geometry.pairs is not None:
            mixed = o[..., self.d_head :].transpose(1, 2)
            edges = torch.cat([edges, self.pair_columns.read(geometry.pairs, mixed)], dim=-1)
        o = o[..., : self.d_head].to(graph.value.dtype)
        gates = self.gates(x)
        if gates is not None:
            o = o * gates.view(b, n, self.n_heads, -1)
        y = self.out(o.flatten(-2)) + self.seen(edges.to(x.dtype))
        return y if mask is None else y.masked_fill(~mask[..., None], 0.0)

    def _graph(self, x: Tensor, geometry: Geometry, mask: Tensor | None) -> Graph:
        q, k, v = self.heads(x)
        if self.pair_columns is not None:
            if geometry.pairs is None:
                raise ValueError(
                    "this attention reads pair features, and geometry.pairs is None; take n_pair_channels=0"
                )
            left, right = self.pair_columns.columns(geometry.pairs, q.dtype)
            q, k, v = torch.cat([q, self.d_head**0.5 * left], -1), torch.cat([k, right], -1), torch.cat([v, right], -1)
        k, v = (geometry.parallel.gather(part, dim=2) for part in (k, v))
        q, k, v = (part.transpose(0, 1).flatten(1, 2) for part in (q, k, v))
        position = geometry.centered(x, mask, 1 if geometry.position is None else geometry.position.shape[-1])
        order = torch.zeros_like(position[..., :1])
        if self.sequence:
            if geometry.sequence is None:
                raise ValueError("sequence=True needs the order of the cells, and geometry.sequence is None")
            order = geometry.sequence[..., None].to(position.dtype)
            order = order if mask is None else order.masked_fill(~mask[..., None], 0.0)
        trust = geometry.trusted(x)[:, None, None].expand_as(order)
        local = torch.cat([position, order, trust], dim=-1)
        coordinates = geometry.parallel.gather(local)
        return Graph(*_edges(x, geometry, mask), q, local.flatten(0, 1), coordinates.flatten(0, 1), k, v)

    def _features(self, source: Tensor, target: Tensor) -> Tensor:
        """Features (S, K + 1, E) of edges from cells at ``source`` (S, 1, D + 2) to cells at ``target`` (S, K + 1, D + 2)."""
        difference = target - source
        shortest, longest = DISTANCES
        log_distance = 0.5 * (difference[..., :-2].square().sum(dim=-1) + shortest**2).log()
        trust = source[..., -1:].detach()
        e = _radial_basis(log_distance, math.log(shortest), math.log(longest), N_BASIS, trust)
        if not self.sequence:
            return e
        last = math.asinh(MAX_STEPS)
        steps = difference[..., -2].asinh()
        return torch.cat([e, _radial_basis(steps, -last, last, N_BASIS + 1, torch.ones_like(trust))], dim=-1)

    @torch.no_grad()
    def weights(  # type: ignore[override]
        self, x: Tensor, rows: Tensor, geometry: Geometry, mask: Tensor | None = None
    ) -> Tensor:
        """Rows (R,) of the attention matrix, (B, H, R, N), without a gradient; 0 for cells that are not neighbors."""
        b, n, _ = x.shape
        graph = self._graph(x, geometry, mask).wide()
        rows = (torch.arange(b, device=x.device)[:, None] * n + rows).flatten()
        a = self._attention(graph, rows)
        dense = a.new_zeros(self.n_heads, len(rows), n)
        dense = dense.scatter_add(2, (graph.target[rows] % n).long().expand_as(a), a)
        return dense.view(self.n_heads, b, -1, n).transpose(0, 1)

    @torch.no_grad()
    def received(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Mean attention that each cell receives from real cells, (B, H, N), without a gradient."""
        b, n, _ = x.shape
        graph = self._graph(x, geometry, mask).wide()
        real = torch.ones(b, n, dtype=torch.bool, device=x.device) if mask is None else mask
        total = graph.coordinates.new_zeros(self.n_heads, b * n)
        for rows in graph.blocks(self.edge.weight):
            a = self._attention(graph, rows) * real.flatten()[rows, None]
            total = total.index_add(1, graph.target[rows].flatten(), a.flatten(1))
        return total.view(-1, b, n).transpose(0, 1) / real.sum(dim=1)[:, None, None].clamp_min(1)

    def _attention(self, graph: Graph, rows: slice | Tensor) -> Tensor:
        """Attention (H, S, K + 1) of the cells ``rows``."""
        with torch.autocast(graph.coordinates.device.type, enabled=False):
            e = self._features(*graph.ends(rows))
            return graph.attention(rows, e @ self.edge.weight.to(e.dtype).T, self.d_head)


class _AlongEdges(torch.autograd.Function):
    """Means of v, (H, S, F), and of edge features, (S, H, n_features), in blocks that the backward pass recomputes."""

    @staticmethod
    def forward(
        ctx: Any, features: Callable[[Tensor, Tensor], Tensor], d_head: int, w: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.features, ctx.d_head = features, d_head
        ctx.save_for_backward(w, *tensors)
        graph = Graph(*tensors).wide()
        w = w.to(graph.coordinates.dtype)
        o, edges = torch.empty_like(graph.query), w.new_empty(len(graph.target), *w.shape)
        for rows in graph.blocks(w):
            e = features(*graph.ends(rows))
            a = graph.attention(rows, e @ w.T, d_head)
            o[:, rows] = edge_sums(a, graph.value, graph.target[rows])
            edges[rows] = a.transpose(0, 1) @ e
        return o, edges

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, grad_edges: Tensor) -> tuple[Tensor | None, ...]:
        weight, *tensors = ctx.saved_tensors
        graph, grad_o = Graph(*tensors).wide(), grad_o.contiguous()
        needs_coordinates, w = ctx.needs_input_grad[7], weight.to(graph.coordinates.dtype)
        weights = w.new_empty(2, len(w), *graph.target.shape)  # attention, and the gradient of the scores
        grad_w, grad_query = torch.zeros_like(w), torch.empty_like(graph.query)
        grad_local, grad_coordinates = torch.zeros_like(graph.local), torch.zeros_like(graph.coordinates)
        for rows in graph.blocks(w):
            target = graph.target[rows]
            ends = [end.detach().requires_grad_(needs_coordinates) for end in graph.ends(rows)]
            with torch.set_grad_enabled(needs_coordinates):
                features = ctx.features(*ends)
            e = features.detach()
            a = graph.attention(rows, e @ w.T, ctx.d_head)
            grad_a = edge_products(grad_o[:, rows], graph.value, target).add_((grad_edges[rows] @ e.mT).transpose(0, 1))
            grad_s = grad_a.sub_((a * grad_a).sum(dim=-1, keepdim=True)).mul_(a)
            weights[0, :, rows], weights[1, :, rows] = a, grad_s
            grad_query[:, rows] = edge_sums(grad_s, graph.key, target)
            grad_w += grad_s.flatten(1) @ e.flatten(0, 1)
            if needs_coordinates:
                grad_e = a.permute(1, 2, 0) @ grad_edges[rows] + grad_s.permute(1, 2, 0) @ w
                grad_source, grad_targets = torch.autograd.grad(features, ends, grad_e)
                grad_local[rows] = grad_source[:, 0]
                grad_coordinates.index_add_(0, target.flatten(), grad_targets.flatten(0, 1))
        returned = returned_sums(weights.flatten(0, 1), (*grad_o, *graph.query), graph.target, len(graph.coordinates))
        grad_value, grad_key = returned.unflatten(0, (2, -1))
        grad_query, grad_key = grad_query / ctx.d_head**0.5, grad_key / ctx.d_head**0.5
        sums = (grad_w, grad_query, grad_local, grad_coordinates, grad_key, grad_value)
        grad_w, *rest = (total.to(tensor.dtype) for total, tensor in zip(sums, (weight, *tensors[2:]), strict=True))
        return None, None, grad_w, None, None, *rest


def _edges(x: Tensor, geometry: Geometry, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ends of the edges among all cells of the batch, and whether they exist, both (B N, K + 1)."""
    (b, n, _), parallel = x.shape, geometry.parallel
    if geometry.neighbors is None:
        raise ValueError("geometry.neighbors is None; compute them by alphastomics.nn.neighbors.neighbor_pairs")
    itself = (parallel.rank * n + torch.arange(n, device=x.device)).expand(b, n)[..., None]
    valid = (geometry.neighbors >= 0) & (geometry.neighbors != itself)
    target = torch.where(valid, geometry.neighbors, itself)
    if mask is not None:
        valid = valid & parallel.gather(mask).gather(1, target.flatten(1)).view_as(target)
    start = parallel.world_size * n * torch.arange(b, device=x.device)
    target = torch.cat([target, itself], dim=-1) + start[:, None, None]
    valid = torch.cat([valid, torch.ones_like(itself, dtype=torch.bool)], dim=-1)
    return target.flatten(0, 1).int(), valid.flatten(0, 1)


def _radial_basis(u: Tensor, low: float, high: float, n: int, height: Tensor) -> Tensor:
    """Radial functions phi (..., n) of ``u`` (...), with centers from ``low`` to ``high``, times ``height`` (..., 1)."""
    scale = 0.5**0.5 * (n - 1) / (high - low)
    v = (scale * u)[..., None] - torch.linspace(scale * low, scale * high, n, dtype=u.dtype, device=u.device)
    return v.square_().neg_().add_(height.log()).exp_()  # in place, since this dominates memory traffic
