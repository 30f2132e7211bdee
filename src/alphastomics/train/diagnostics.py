r"""Statistics of each layer during training: gates, attention sinks, and use of the experts.

.. math::

    \text{gate\_mean} = \operatorname{mean}_{i,h}\, g_{ih}, \qquad
    \text{gate\_sd} = \operatorname{sd}_{i,h}\, g_{ih}, \qquad
    \text{sink} = \max_{h,j} \frac1n \sum_i A_{hij}

g are the gates and A the attention weights of head h from cell i to cell j, of n cells. Healthy gates have a mean of 0.5 ± 0.2.
Uniform attention has a sink of 1 / n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from alphastomics.nn import Routing, expert_usage
from alphastomics.nn.geometry import processes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from alphastomics.nn.diagnostics import LayerInputs

LAYER = "train_layer_"  # prefix of the names of all statistics
EVERY = 10  # steps between two measurements
SINK_CELLS = 256  # cells among which sinks are computed


@torch.no_grad()
def layer_statistics(layers: Mapping[int, LayerInputs], mask: Tensor, n_cells: Sequence[int]) -> dict[str, Tensor]:
    """Statistics of each layer by name, ``train_layer_0_gate_mean``, ``…_gate_sd``, ``…_sink``, ``…_expert_usage_0``, ….

    ``layers`` holds the inputs of each layer, ``mask`` (B, N) the real cells, and ``n_cells`` their number in each context.
    """
    values: dict[str, Tensor] = {}
    first = next((i for i, n in enumerate(n_cells) if n), None)  # the first context that is not all padding
    for i, layer in layers.items():
        name = f"{LAYER}{i}"
        parallel = processes_of(layer.geometry)
        gates = layer.attention.gates(layer.x)
        if gates is not None:
            gates = parallel.gather(gates.float(), mask.shape[1])
            values[f"{name}_gate_mean"], values[f"{name}_gate_sd"] = _mean_sd(gates, mask)
        values[f"{name}_sink"] = mask.new_zeros((), dtype=torch.float32) if first is None else _sink(layer, first, mask)
        if layer.routing is not None:
            routing = Routing(*(parallel.gather(part, mask.shape[1]) for part in layer.routing))
            usage = expert_usage(routing, mask)
            values |= {f"{name}_expert_usage_{expert}": share for expert, share in enumerate(usage)}
    return values


def _sink(layer: LayerInputs, context: int, mask: Tensor) -> Tensor:
    """Sink among some cells of a context."""
    subset = mask[context : context + 1, :SINK_CELLS]
    x = processes_of(layer.geometry).first(layer.x[context : context + 1], subset.shape[1])
    geometry = layer.geometry.part(context, x.shape[1]) if layer.geometry else None
    return layer.attention.received(x, geometry, subset).max().float()


def _mean_sd(gates: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    real = mask[..., None].expand_as(gates)
    n = real.sum().clamp_min(1)
    mean = (gates * real).sum() / n
    return mean, (((gates - mean) * real).square().sum() / n).sqrt()
