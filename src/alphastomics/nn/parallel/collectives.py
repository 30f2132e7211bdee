r"""Differentiable collectives.

With the input :math:`x^r` and the output :math:`y^r` of process r, and bars for derivatives of the sum of all losses:

.. math::

    \text{exchange} &: & y^r_s &= x^s_r & \bar x^r_s &= \bar y^s_r \\
    \text{gather} &: & y^r_s &= x^s & \bar x^r &= \textstyle\sum_s \bar y^s_r \\
    \text{total} &: & y^r &= \textstyle\sum_s x^s & \bar x^r &= \textstyle\sum_s \bar y^s

``torch.distributed`` computes the left column without derivatives. All processes of a group must call the same collectives in
the same order. Without a group there is one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return exchange(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        y = x.new_empty(dist.get_world_size(group), *x.shape)
        dist.all_gather(list(y.unbind()), x.contiguous(), group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return exchange(grad, ctx.group).sum(dim=0), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return total(grad, ctx.group), None


def exchange(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send part s of ``x`` (W, ...) to process s; part s of the result (W, ...) is from process s."""
    return x if group is None else cast("Tensor", _Exchange.apply(x, group))


def gather(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Stack ``x`` (n, ...), of the same shape on all processes, to (W, n, ...), the same on all."""
    return x[None] if group is None else cast("Tensor", _Gather.apply(x, group))


def total(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum ``x`` over all processes; the result is the same on all."""
    return x if group is None else cast("Tensor", _Total.apply(x, group))
