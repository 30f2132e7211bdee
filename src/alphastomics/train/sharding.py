"""A network whose weights are spread over processes (FSDP2), and gradients that every parameter has at every step.

Each block is a unit: its weights are gathered for the time in which it runs. What is left, the embeddings and heads, is one
more. All processes must have gradients of the same parameters, or they wait for each other for ever; which losses a batch
has, and with them which heads it uses, depends on its contexts. So every parameter gets one, 0 where nothing used it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from alphastomics.nn.denoiser import Prediction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from alphastomics.nn import Denoiser


class _Reached(torch.autograd.Function):
    """The identity, with a gradient of 0 for further tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.shapes]
        return grads[0], *zeros


def reached(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """``x``, whose gradient reaches all of some parameters."""
    found: Tensor = _Reached.apply(x, *(p for p in parameters if p.requires_grad))  # type: ignore[no-untyped-call]
    return found


def shard(module: Denoiser, mesh: DeviceMesh) -> Denoiser:
    """A copy whose parameters are spread over the processes of a mesh of one dimension.

    Layers that share their weights are one unit with the rest.
    """
    copy = deepcopy(module)
    blocks = list(copy.blocks) if copy.config.layer_sharing == "none" else []
    for unit in blocks:
        unit.register_forward_hook(_reach)
        fully_shard(unit, mesh=mesh)
    copy.register_forward_hook(_reach)
    fully_shard(copy, mesh=mesh)
    return copy


def _reach(unit: nn.Module, _: Any, output: Any) -> Any:
    """Let the gradient of an output reach all weights of its unit, which are whole at this moment."""
    if not torch.is_grad_enabled():
        return output
    whole = [p for p in unit.parameters() if not isinstance(p, DTensor)]
    if not isinstance(output, Prediction):
        return reached(output, whole)
    return output._replace(position=reached(output.position, whole))


def is_sharded(module: nn.Module) -> bool:
    """Whether the parameters of a network are spread over processes."""
    return any(isinstance(p, DTensor) for p in module.parameters()) or isinstance(module, FSDPModule)


def at_rest(module: nn.Module) -> list[Tensor]:
    """Values of all parameters, those of this process alone where they are spread; gathered ones are let go."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    return [parameter.data for parameter in module.parameters()]


def own(values: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of each value."""
    return [value.to_local() if isinstance(value, DTensor) else value for value in values]


def whole(value: Tensor) -> Tensor:
    """All of a value that may be spread; all processes must ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def spread_as(value: Tensor, model: Tensor) -> Tensor:
    """A value on the device of another, and spread as that one is."""
    value = value.to(model.device)
    if isinstance(value, DTensor) or not isinstance(model, DTensor):
        return value
    return distribute_tensor(value, model.device_mesh, model.placements)


@torch.no_grad()
def copy_whole(sharded: nn.Module, module: nn.Module) -> None:
    """Write the weights that are spread into the network that they come from; all processes must call."""
    at_rest(sharded)
    for old, new in zip(module.parameters(), sharded.parameters(), strict=True):
        old.copy_(whole(new.data))
    for old, new in zip(module.buffers(), sharded.buffers(), strict=True):
        old.copy_(new)
