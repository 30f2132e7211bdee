r"""Layers that share weights along the depth (Dehghani et al. 2019; Lan et al. 2020).

.. math::

    x^{l+1} = f_{\theta(s(l)),\, \omega(l)}(x^l), \qquad
    s(l) = \begin{cases}
        l & \text{none} \\ 0 & \text{universal} \\ l \bmod 2 & \text{alternating} \\ \lfloor l / b \rfloor & \text{block}
    \end{cases}

θ are weights that depths with the same s(l) share, ω weights that are separate for each depth: those of norms and their
modulation by the timesteps are few, and let layers with the same θ differ by depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from alphastomics.config import Sharing


def layer_index(n_layers: int, sharing: Sharing, *, block_size: int = 4) -> list[int]:
    """Set of weights at each depth, s(l); the last block is smaller if ``block_size`` does not divide ``n_layers``.

    Raises ``ValueError`` if the kind of sharing is unknown, or there is no layer or an empty block.
    """
    if n_layers < 1 or block_size < 1:
        raise ValueError(f"n_layers={n_layers} and block_size={block_size} must be at least 1")
    if sharing not in ("none", "universal", "alternating", "block"):
        raise ValueError(f"sharing={sharing!r} is unknown; choose 'none', 'universal', 'alternating' or 'block'")
    divisor = {"none": 1, "universal": n_layers, "block": block_size}
    return [depth % 2 if sharing == "alternating" else depth // divisor[sharing] for depth in range(n_layers)]


class LayerStack(nn.Module):
    """Layers in order of depth, some of which share weights.

    Every depth has a layer, so that code that iterates over layers or recomputes them does not depend on sharing. Layers with
    the same s(l) hold the same parameter and submodule objects, except those in ``unshared``. Each tensor is saved once, under its
    name in the first of these layers.

    Parameters
    ----------
    make_layer
        Makes a layer.
    n_layers
        Depth.
    sharing
        ``"none"``; ``"universal"``: one set of weights; ``"alternating"``: two in turn; or ``"block"``: one for each block of
        layers.
    block_size
        b, layers in a block, for ``"block"``.
    unshared
        Names of the parameters, buffers and submodules that are separate for each depth, with dots for nested ones, such as
        ``"attention.axes"``; see ``UNSHARED`` of :class:`~alphastomics.nn.block.Block`.

    Attributes
    ----------
    index
        Set of weights at each depth, s(l).

    Raises
    ------
    ValueError
        As for :func:`layer_index`, or if a layer has no part of a name in ``unshared``.
    """

    def __init__(
        self,
        make_layer: Callable[[], nn.Module],
        n_layers: int,
        *,
        sharing: Sharing = "none",
        block_size: int = 4,
        unshared: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.index = layer_index(n_layers, sharing, block_size=block_size)
        for depth, number in enumerate(self.index):
            layer = make_layer()
            first = self.index.index(number)
            if first < depth:
                _tie(layer, self[first], unshared)
            elif missing := {name for name in unshared if not _has(layer, name)}:
                raise ValueError(f"{type(layer).__name__} has no part {', '.join(sorted(missing))}; check unshared=")
            self.add_module(str(depth), layer)
        self.register_state_dict_post_hook(_drop_repeated)
        self.register_load_state_dict_pre_hook(_restore_repeated)

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[depth] for depth in range(len(self)))

    def __getitem__(self, depth: int) -> nn.Module:
        return self.get_submodule(str(range(len(self.index))[depth]))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run all layers on ``x``, each with the same further arguments."""
        for layer in self:
            x = layer(x, *args, **kwargs)
        return x

    @property
    def compression_ratio(self) -> float:
        """Parameters summed over depths, divided by the number of distinct parameters."""
        run = sum(_count(layer) for layer in self)
        return run / _count(self)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())  # shared ones once


def _parts(layer: nn.Module) -> set[str]:
    return {name for name, _ in layer.named_children()} | {name for name, _ in layer.named_parameters(recurse=False)}


def _has(layer: nn.Module, name: str) -> bool:
    part, _, rest = name.partition(".")
    if rest:
        return part in dict(layer.named_children()) and _has(layer.get_submodule(part), rest)
    return part in _parts(layer) | {buffer for buffer, _ in layer.named_buffers(recurse=False)}


def _tie(layer: nn.Module, first: nn.Module, unshared: Sequence[str]) -> None:
    for name in _parts(layer) - set(unshared):
        within = [each.removeprefix(f"{name}.") for each in unshared if each.startswith(f"{name}.")]
        if within:
            _tie(layer.get_submodule(name), first.get_submodule(name), within)
        else:
            setattr(layer, name, getattr(first, name))


def _repeated(stack: LayerStack, prefix: str) -> dict[str, str]:
    """Map later names of shared parameters and buffers to their first name."""
    first: dict[int, str] = {}
    repeated = {}
    everything = [*stack.named_parameters(remove_duplicate=False), *stack.named_buffers(remove_duplicate=False)]
    for name, tensor in everything:
        earlier = first.setdefault(id(tensor), name)
        if earlier != name:
            repeated[prefix + name] = prefix + earlier
    return repeated


def _drop_repeated(stack: LayerStack, state: dict[str, Any], prefix: str, _: Any) -> None:
    # safetensors does not save two names for the same memory.
    for name in _repeated(stack, prefix):
        state.pop(name, None)


def _restore_repeated(
    stack: LayerStack,
    state: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    _missing: list[str],
    unexpected: list[str],
    _errors: list[str],
) -> None:
    for name, earlier in _repeated(stack, prefix).items():
        if name in state:  # saved by a stack with less sharing
            unexpected.append(name)
        elif earlier in state:
            state[name] = state[earlier]
