r"""Ring attention (Liu, Zaharia & Abbeel, ICLR 2024): queries stay, keys and values are passed from process to process.

.. math::

    s = \gamma\, q k^\top, \qquad \lambda_i = \log \sum_j e^{s_{ij}}, \qquad o_i = \sum_j e^{s_{ij} - \lambda_i} v_j

is the attention to one part of the keys. The parts combine to

.. math::

    \lambda = \log \sum_{s} e^{\lambda_s}, \qquad o = \sum_{s} e^{\lambda_s - \lambda}\, o_s

with :math:`(o_s, \lambda_s)` the attention to the cells of process s. After W - 1 steps around the ring every query has attended to
every key, and no process has stored more than two parts of them. Given :math:`\lambda` and o of *all* keys, gradients of the
parts are independent of each other (Dao et al., NeurIPS 2022, algorithm 4):

.. math::

    p = e^{s - \lambda}, \quad \bar v = p^\top \bar o, \quad
    \bar s = p \odot (\bar o v^\top - \langle \bar o, o \rangle), \quad
    \bar q = \gamma\, \bar s k, \quad \bar k = \gamma\, \bar s^\top q .

The gradient of a part of the keys is passed on with it and returns to its process after W steps. PyTorch's kernel for CPUs
returns :math:`\lambda`; on other devices scores are computed in blocks of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from alphastomics.nn._torch_compat import flash_attention_cpu, flash_attention_cpu_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from alphastomics.nn.parallel.sequence import SequenceParallel

BLOCK = 2**24  # scores in memory at a time


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of queries (B, H, n, c) to keys and values (B, H, m, c): o (B, H, n, c) and lambda (B, H, n)."""
    if q.device.type == "cpu":
        return cast("tuple[Tensor, Tensor]", flash_attention_cpu(q, k, v, 0.0, False, scale=scale))
    return attend_by_rows(q, k, v, scale)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from ``grad``, that of o; ``o`` and ``lse`` (lambda) are those of all keys."""
    if q.device.type == "cpu":
        grads = flash_attention_cpu_backward(grad, q, k, v, o, lse, 0.0, False, scale=scale)
        return cast("tuple[Tensor, Tensor, Tensor]", grads)
    return attend_by_rows_backward(grad, q, k, v, o, lse, scale)


def attend_by_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As :func:`attend`, on any device, in float32 at least."""
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = _at_least_float32(q * scale, k, v)
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
        for rows in _rows(q, k):
            s = q[:, :, rows] @ k.mT
            lse[:, :, rows] = s.logsumexp(dim=-1)
            o[:, :, rows] = (s - lse[:, :, rows, None]).exp() @ v
    return o, lse


def attend_by_rows_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`attend_backward`, on any device, in float32 at least."""
    with torch.autocast(q.device.type, enabled=False):
        grad, q, k, v, o = _at_least_float32(grad, q, k, v, o)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows in _rows(q, k):
            grad_o = grad[:, :, rows]
            p = (scale * q[:, :, rows] @ k.mT - lse[:, :, rows, None]).exp()
            grad_v += p.mT @ grad_o
            grad_s = scale * p * (grad_o @ v.mT - (grad_o * o[:, :, rows]).sum(dim=-1, keepdim=True))
            grad_q[:, :, rows] = grad_s @ k
            grad_k += grad_s.mT @ q[:, :, rows]
    return grad_q, grad_k, grad_v


def _at_least_float32(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]


def _rows(q: Tensor, k: Tensor) -> Iterator[slice]:
    b, h, n, _ = q.shape
    size = max(1, BLOCK // (b * h * k.shape[2]))
    return (slice(start, start + size) for start in range(0, n, size))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parallel: SequenceParallel, scale: float) -> Tensor:
        ctx.parallel, ctx.scale = parallel, scale
        precise = torch.promote_types(q.dtype, torch.float32)
        o, lse = (
            torch.zeros_like(q, dtype=precise),
            torch.full(q.shape[:-1], -torch.inf, dtype=precise, device=q.device),
        )
        kv = torch.stack([k, v])
        for step in range(parallel.world_size):
            arriving = _pass_on(kv, parallel) if step < parallel.world_size - 1 else None
            o_s, lse_s = attend(q, kv[0], kv[1], scale)
            merged = torch.logaddexp(lse, lse_s)
            o = o * (lse - merged).exp()[..., None] + o_s * (lse_s - merged).exp()[..., None]
            lse = merged
            kv = arriving() if arriving else kv
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, o, lse = ctx.saved_tensors
        parallel = ctx.parallel
        kv = torch.stack([k, v])
        grad_q, grad_kv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
        for step in range(parallel.world_size):
            arriving = _pass_on(kv, parallel) if step < parallel.world_size - 1 else None
            parts = attend_backward(grad, q, kv[0], kv[1], o, lse, ctx.scale)
            for sum_, part in zip((grad_q, grad_kv[0], grad_kv[1]), parts, strict=True):
                sum_ += part
            kv = arriving() if arriving else kv
            grad_kv = _pass_on(grad_kv, parallel)()
        return grad_q.to(q.dtype), grad_kv[0].to(k.dtype), grad_kv[1].to(v.dtype), None, None


def _pass_on(x: Tensor, parallel: SequenceParallel) -> Callable[[], Tensor]:
    """Start sending ``x`` to the next process; the returned function waits for the tensor of the previous one."""
    if parallel.group is None:
        return lambda: x
    received = torch.empty_like(x)
    after, before = (
        dist.get_global_rank(parallel.group, (parallel.rank + step) % parallel.world_size) for step in (1, -1)
    )
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, after, parallel.group), dist.P2POp(dist.irecv, received, before, parallel.group)]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received

    return wait


def ring(q: Tensor, k: Tensor, v: Tensor, parallel: SequenceParallel, scale: float) -> Tensor:
    """Attention (B, H, n, c) of the queries of this process to the keys of all; q, k and v are (B, H, n, c)."""
    return cast("Tensor", _Ring.apply(q, k, v, parallel, scale))
