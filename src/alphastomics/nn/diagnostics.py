r"""The size of a network, and what its layers are given while it runs.

:func:`matched_width` finds the width at which a denoiser has a given number of parameters P,

.. math:: d^\star = \arg\min_d \, \lvert P(d) - P \rvert

over the widths d that the heads divide. P(d) grows with d, so the search is by bisection, on networks without memory.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from alphastomics.nn.denoiser import Denoiser
from alphastomics.nn.experts import Experts, Routing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from alphastomics.nn.attention import Attention
    from alphastomics.nn.block import Block
    from alphastomics.nn.config import DenoiserConfig
    from alphastomics.nn.geometry import Geometry


WIDEST = 2**20  # steps of the width


class ParameterCount(NamedTuple):
    """Parameters of a network, and how many of them act on one cell."""

    total: int
    active: int


def count_parameters(network: nn.Module) -> ParameterCount:
    """Count the parameters of a network, and those that act on one cell: k of the E experts of each layer."""
    total = sum(parameter.numel() for parameter in network.parameters())
    idle = 0
    for part in network.modules():
        if isinstance(part, Experts):
            of_experts = sum(p.numel() for p in (part.weight_1, part.bias_1, part.weight_2, part.bias_2))
            idle += of_experts // part.num_experts * (part.num_experts - part.top_k)
    return ParameterCount(total, total - idle)


def matched_width(config: DenoiserConfig, n_parameters: int) -> int:
    """Width ``d_model`` at which a denoiser comes nearest to ``n_parameters`` in total, all else as in ``config``."""
    step = lcm(2, config.n_heads)  # halves of sines and cosines, and whole heads

    def total(k: int) -> int:
        with torch.device("meta"):
            return count_parameters(Denoiser(replace(config, d_model=step * k))).total

    high = 1
    while total(high) < n_parameters and high < WIDEST:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) < n_parameters else (low, middle)
    nearest = min((k for k in (low, high) if k > 0), key=lambda k: abs(total(k) - n_parameters))
    return step * nearest


@dataclass(kw_only=True, slots=True)
class SeenLayer:
    """What one layer was last given.

    Attributes
    ----------
    attention
        Its attention.
    x
        What the attention was given (B, N, d), without a gradient.
    geometry
        Geometry of the cells; None where it was not given.
    mask
        Cells that are attended to (B, N); None when all are.
    routing
        Where the experts sent the cells; None where there are none.
    """

    attention: Attention
    x: Tensor
    geometry: Geometry | None
    mask: Tensor | None
    routing: Routing | None = None


@contextmanager
def watch_layers(denoiser: Denoiser) -> Iterator[dict[int, SeenLayer]]:
    """Keep what each layer was last given, by its number, while the context is open."""
    seen: dict[int, SeenLayer] = {}
    current = 0  # layers may share their parts, so the number of the layer is kept here

    def before_layer(layer: int) -> None:
        nonlocal current
        current = layer

    def before_attention(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x, geometry, mask = arguments
        seen[current] = SeenLayer(attention=cast("Attention", module), x=x.detach(), geometry=geometry, mask=mask)

    def after_experts(_: nn.Module, __: tuple[Any, ...], result: tuple[Tensor, Routing]) -> None:
        seen[current].routing = Routing(*(part.detach() for part in result[1]))

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
        yield seen
