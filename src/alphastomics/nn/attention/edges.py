r"""Products and sums along the edges of a graph in which every cell i has E edges, to the cells :math:`n_{ie}`.

.. math::

    s_{ie} = q_i \cdot k_{n_{ie}}, \qquad o_i = \sum_e a_{ie} v_{n_{ie}}, \qquad
    g_j = \sum_{(i, e) \,:\, n_{ie} = j} a_{ie} q_i

per head; the gradients of each are computed by the others. Rows of k and v are not gathered: gathered rows take E times the
memory, and moving them takes longer than the arithmetic. s is a sampled matrix product at the entries of a sparse matrix, o is
a weighted bag of embeddings, and so is g after sorting the edges by their ends. Edges may be repeated.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from alphastomics.nn._torch_compat import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def edge_products(query: Tensor, key: Tensor, target: Tensor) -> Tensor:
    """Products s (H, S, E) of q (H, S, F) and k (H, M, F) at the ends n (S, E) of the edges, without a gradient.

    q and k must have 32 or 64 bits, the ends 32 bits.
    """
    n, degree = target.shape
    ends = target.flatten()
    if key.device.type != "cpu":  # a GPU gathers fast, and the rows of one head fit in memory
        gathered = (k.index_select(0, ends).view(n, degree, -1) for k in key)
        return torch.stack([(rows @ q[..., None])[..., 0] for q, rows in zip(query, gathered, strict=True)])
    if isinstance(target, FakeTensor):  # sparse tensors cannot be fake
        return query.new_empty(len(query), n, degree)
    if degree > key.shape[1]:  # a row of a sparse matrix may not have more entries than columns
        key = F.pad(key, (0, 0, 0, degree - key.shape[1]))
    _suppress_beta_warning()
    first = torch.arange(0, n * degree + 1, degree, dtype=target.dtype)
    products = []
    for q, k in zip(query, key, strict=True):
        edges = torch.sparse_csr_tensor(first, ends, q.new_zeros(n * degree), (n, len(k)), check_invariants=False)
        products.append(torch.sparse.sampled_addmm(edges, q, k.T, beta=0.0, out=edges).values())
    return torch.stack(products).view(-1, n, degree)


def edge_sums(weight: Tensor, value: Tensor, target: Tensor) -> Tensor:
    """Sums o (H, S, F) of the rows of v (H, M, F) at the ends n (S, E) of the edges, with weights a (H, S, E)."""
    pairs = zip(weight, value, strict=True)
    return torch.stack([F.embedding_bag(target, v, mode="sum", per_sample_weights=a) for a, v in pairs])


def returned_sums(weight: Tensor, query: Iterable[Tensor], target: Tensor, n: int) -> Tensor:
    """Sums g (H, M, F) of the rows of q, H times (S, F), over the edges to each of M = ``n`` cells, with weights a (H, S, E)."""
    degree = target.shape[1]
    ends, edge = target.flatten().sort()
    first = torch.searchsorted(ends, torch.arange(n, dtype=ends.dtype, device=ends.device), out_int32=True)
    origin = (edge // degree).int()
    sums = []
    for a, q in zip(weight.flatten(1), query, strict=True):
        sums.append(F.embedding_bag(origin, q, first, mode="sum", per_sample_weights=a.index_select(0, edge)))
    return torch.stack(sums)


@cache
def _suppress_beta_warning() -> None:
    """Suppress the warning, issued once, that sparse tensors are in beta state."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        torch.eye(1).to_sparse_csr()
