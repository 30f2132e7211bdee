r"""Ring attention (Liu, Zaharia & Abbeel, ICLR 2024): queries stay, keys and values travel from process to process.

.. math::

    \lambda = \log \sum_{s} e^{\lambda_s}, \qquad o = \sum_{s} e^{\lambda_s - \lambda}\, o_s

with :math:`(o_s, \lambda_s)` the attention to the cells of process s alone, see :mod:`alphastomics.nn.parallel.kernel`.
After W - 1 steps around the ring every query has met every key, and no process has ever held more than two parts of
them. The gradient goes around the ring as well: that of a part of the keys travels with it, and is home after W steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from alphastomics.nn.parallel.kernel import attend, attend_backward

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.nn.parallel.sequence import SequenceParallel


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
    """Begin to send ``x`` to the next process; the function given back waits for what the one before has sent."""
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
