"""Networks whose weights are sharded over processes (FSDP2), with a gradient of every parameter in every step.

Each block is a unit, whose weights are gathered while it runs; embeddings and heads are one more unit. All processes must
have gradients of the same parameters, otherwise they wait for each other without end. Which heads of the network a batch uses
depends on its contexts; parameters that it does not use get a gradient of 0.
"""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from alphastomics.nn import Denoiser


class _TouchAllParams(torch.autograd.Function):
    """The identity of the first tensor, with a gradient of 0 for the others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.shapes]
        return grads[0], *zeros


def touch_all_params(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """``x``, with a gradient of 0 for all parameters that are not sharded."""
    here = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    found: Tensor = _TouchAllParams.apply(x, *here)
    return found


def fill_gradients(parameters: Iterable[Tensor]) -> None:
    """Give parameters without a gradient one of 0, after the backward pass of a single process."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def shard(module: Denoiser, mesh: DeviceMesh) -> Denoiser:
    """A copy whose parameters are sharded over a one-dimensional mesh; layers that share weights are in the last unit."""
    copy = deepcopy(module)
    blocks = list(copy.blocks) if copy.config.layer_sharing == "none" else []
    for unit in blocks:
        unit.register_forward_pre_hook(_touch_block_params)
        fully_shard(unit, mesh=mesh)
    fully_shard(copy, mesh=mesh)
    return copy


def _touch_block_params(unit: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add a gradient of 0 for all weights of a block while they are gathered."""
    if not torch.is_grad_enabled():
        return inputs
    return touch_all_params(inputs[0], unit.parameters()), *inputs[1:]


@contextmanager
def full_weights(units: Iterable[nn.Module]) -> Iterator[None]:
    """Gather the weights of units within the context; all processes must call."""
    spread = [unit for unit in units if isinstance(unit, FSDPModule)]
    for unit in spread:
        unit.unshard()
    try:
        yield
    finally:
        for unit in spread:
            unit.reshard()


def local_params(module: nn.Module) -> list[Tensor]:
    """Values of all parameters, sharded ones as ``DTensor``; frees gathered weights."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return [parameter.data for parameter in module.parameters()]


def to_local(values: Iterable[Tensor]) -> list[Tensor]:
    """The local shard of each value."""
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def full_tensor(value: Tensor) -> Tensor:
    """The full value of a tensor that may be sharded; all processes must call."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def distribute_like(value: Tensor, model: Tensor) -> Tensor:
    """``value`` on the device of ``model`` and sharded like it."""
    value = value.to(model.device)
    if isinstance(value, DTensor) or not isinstance(model, DTensor):
        return value
    return distribute_tensor(value, model.device_mesh, model.placements)


@torch.no_grad()
def copy_full_params(sharded: nn.Module, module: nn.Module) -> None:
    """Copy sharded weights into the network from which they were sharded; all processes must call."""
    local_params(sharded)
    for parameter, shards in zip(module.parameters(), sharded.parameters(), strict=True):
        parameter.copy_(full_tensor(shards.data))
    for buffer, sharded_buffer in zip(module.buffers(), sharded.buffers(), strict=True):
        buffer.copy_(sharded_buffer)
