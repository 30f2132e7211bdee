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
    current = 0  # layers may share their parts, which then cannot tell where they are

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
