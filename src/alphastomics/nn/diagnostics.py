r"""Size of a network, and inputs of its layers while it runs.

:func:`matched_width` finds the width at which a denoiser has a given number of parameters P,

.. math:: d^\star = \arg\min_d \, \lvert P(d) - P \rvert

over the widths d that are multiples of the number of heads, by bisection, because P(d) grows with d. The networks are built
on the meta device and take no memory.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from alphastomics.nn.block import EXPANSION
from alphastomics.nn.denoiser import Denoiser
from alphastomics.nn.experts import Experts, Routing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from alphastomics.nn.attention import Attention
    from alphastomics.nn.block import Block
    from alphastomics.nn.config import DenoiserConfig
    from alphastomics.nn.geometry import Geometry


MAX_STEPS = 2**20  # in steps of the width


class ParameterCount(NamedTuple):
    """Number of parameters of a network, and of those that act on one cell."""

    total: int
    active: int


def count_parameters(network: nn.Module) -> ParameterCount:
    """Count the parameters of a network; on one cell only k of the E experts of a layer are active."""
    total = sum(parameter.numel() for parameter in network.parameters())
    idle = 0
    for part in network.modules():
        if isinstance(part, Experts):
            of_experts = sum(p.numel() for p in (part.weight_1, part.bias_1, part.weight_2, part.bias_2))
            idle += of_experts // part.num_experts * (part.num_experts - part.top_k)
    return ParameterCount(total, total - idle)


def matched_width(config: DenoiserConfig, n_parameters: int) -> int:
    """Width ``d_model`` at which a denoiser, otherwise as in ``config``, has closest to ``n_parameters`` parameters."""
    split = config.num_experts if config.use_moe and config.expert_width == "split" else 1
    step = lcm(config.n_heads, config.bottleneck or 1, split // gcd(split, EXPANSION))

    def total(k: int) -> int:
        with torch.device("meta"):
            return count_parameters(Denoiser(replace(config, d_model=step * k))).total

    high = 1
    while total(high) < n_parameters and high < MAX_STEPS:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) < n_parameters else (low, middle)
    nearest = min((k for k in (low, high) if k > 0), key=lambda k: abs(total(k) - n_parameters))
    return step * nearest


@dataclass(kw_only=True, slots=True)
class LayerInputs:
    """Last inputs of one layer.

    Attributes
    ----------
    attention
        Attention of the layer.
    x
        Input (B, N, d) of the attention, without a gradient.
    geometry
        Geometry of the cells, if any.
    routing
        Routing of the cells; None without experts.
    """

    attention: Attention
    x: Tensor
    geometry: Geometry | None
    routing: Routing | None = None


@contextmanager
def watch_layers(denoiser: Denoiser) -> Iterator[dict[int, LayerInputs]]:
    """Record the last inputs of each layer, by its number, while the context is open."""
    inputs: dict[int, LayerInputs] = {}
    current = 0  # layers may share modules, so that a module does not determine its layer

    def before_layer(layer: int) -> None:
        nonlocal current
        current = layer

    def before_attention(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x, geometry, _ = arguments
        inputs[current] = LayerInputs(attention=cast("Attention", module), x=x.detach(), geometry=geometry)

    def after_experts(_: nn.Module, __: tuple[Any, ...], result: tuple[Tensor, Routing]) -> None:
        inputs[current].routing = Routing(*(part.detach() for part in result[1]))

    blocks = cast("list[Block]", list(denoiser.blocks))
    with ExitStack() as hooks:
        handles = [
            block.register_forward_pre_hook(lambda _, __, i=i: before_layer(i)) for i, block in enumerate(blocks)
        ]
        handles += [part.register_forward_pre_hook(before_attention) for part in {block.attention for block in blocks}]
        experts = {block.ffn for block in blocks if isinstance(block.ffn, Experts)}
        handles += [part.register_forward_hook(after_experts) for part in experts]
        for handle in handles:
            hooks.callback(handle.remove)
        yield inputs
