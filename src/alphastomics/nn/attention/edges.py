r"""Products and sums along the edges of a graph, in which every cell i has E edges, to the cells :math:`n_{ie}`.

.. math::

    s_{ie} = q_i \cdot k_{n_{ie}}, \qquad o_i = \sum_e a_{ie} v_{n_{ie}}, \qquad
    g_j = \sum_{(i, e) \,:\, n_{ie} = j} a_{ie} q_i

per head; the gradients of each are the others. Rows of k and v are read where they lie: gathered, they would be E times as
large, and moving them takes longer than all the arithmetic. s is a product of matrices at the places of a sparse one, and o
a bag of embeddings with weights; so is g, once the edges are sorted by their ends. An edge may be there twice.
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


def edge_products(query: Tensor, key: Tensor, other: Tensor) -> Tensor:
    """Products s (H, S, E), without a gradient of their own.

    Parameters
    ----------
    query, key
        q (H, S, F) and k (H, M, F), in 32 or 64 bits.
    other
        Ends n (S, E) of the edges, rows of ``key``, in 32 bits.
    """
    n, degree = other.shape
    ends = other.flatten()
    if key.device.type != "cpu":  # a GPU moves rows fast, and one head is not much
        gathered = (k.index_select(0, ends).view(n, degree, -1) for k in key)
        return torch.stack([(rows @ q[..., None])[..., 0] for q, rows in zip(query, gathered, strict=True)])
    if isinstance(other, FakeTensor):  # there are no sparse tensors without data
        return query.new_empty(len(query), n, degree)
    if degree > key.shape[1]:  # a sparse matrix may not have more entries than places
        key = F.pad(key, (0, 0, 0, degree - key.shape[1]))
    _accept_sparse_tensors()
    first = torch.arange(0, n * degree + 1, degree, dtype=other.dtype)
    products = []
    for q, k in zip(query, key, strict=True):
        place = torch.sparse_csr_tensor(first, ends, q.new_zeros(n * degree), (n, len(k)), check_invariants=False)
        products.append(torch.sparse.sampled_addmm(place, q, k.T, beta=0.0, out=place).values())
    return torch.stack(products).view(-1, n, degree)


def edge_sums(weight: Tensor, value: Tensor, other: Tensor) -> Tensor:
    """Sums o (H, S, F) with weights a (H, S, E) of the rows of v (H, M, F) at the ends n (S, E) of the edges."""
    pairs = zip(weight, value, strict=True)
    return torch.stack([F.embedding_bag(other, v, mode="sum", per_sample_weights=a) for a, v in pairs])


def returned_sums(weight: Tensor, query: Iterable[Tensor], other: Tensor, n: int) -> Tensor:
    """Sums g (H, M, F), over the edges to each of M = ``n`` cells, with weights a (H, S, E) of the rows of q, H times (S, F)."""
    degree = other.shape[1]
    ends, edge = other.flatten().sort()
    first = torch.searchsorted(ends, torch.arange(n, dtype=ends.dtype, device=ends.device), out_int32=True)
    origin = (edge // degree).int()
    sums = []
    for a, q in zip(weight.flatten(1), query, strict=True):
        sums.append(F.embedding_bag(origin, q, first, mode="sum", per_sample_weights=a.index_select(0, edge)))
    return torch.stack(sums)


@cache
def _accept_sparse_tensors() -> None:
    """Hear once, and out of sight, that sparse tensors are new; nothing of what is new is used."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        torch.eye(1).to_sparse_csr()
