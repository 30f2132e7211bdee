"""Looking at the layers of a network while it runs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from alphastomics.nn.experts import Experts, Routing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from alphastomics.nn.attention import Attention
    from alphastomics.nn.block import Block
    from alphastomics.nn.denoiser import Denoiser
    from alphastomics.nn.geometry import Geometry


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

    def before_attention(layer: int, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x, geometry, mask = arguments
        seen[layer] = SeenLayer(attention=cast("Attention", module), x=x.detach(), geometry=geometry, mask=mask)

    def after_experts(layer: int, result: tuple[Tensor, Routing]) -> None:
        seen[layer].routing = Routing(*(part.detach() for part in result[1]))

    with ExitStack() as hooks:
        for i, block in enumerate(cast("list[Block]", list(denoiser.blocks))):
            handle = block.attention.register_forward_pre_hook(lambda m, a, i=i: before_attention(i, m, a))
            hooks.callback(handle.remove)
            if isinstance(block.ffn, Experts):
                handle = block.ffn.register_forward_hook(lambda _, __, result, i=i: after_experts(i, result))
                hooks.callback(handle.remove)
        yield seen
