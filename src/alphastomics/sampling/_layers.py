"""Attention gates, attention weights and expert routing of a trained network.

As in :meth:`AlphaSTomics.get_latent_representation`, the input is clean expression without positions, and the cells of a
slice form one context, or several if the slice is large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from alphastomics.config._sampling import MAX_CONTEXT
from alphastomics.data import AnnDataSource
from alphastomics.nn.diagnostics import LayerInputs, watch_layers
from alphastomics.sampling._cells import content_order, encode_cells

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.sampling._sampler import Sampler


class RecordedContext(NamedTuple):
    """One context after a forward pass: name of its slice, rows of its cells (n,), inputs of each layer by index."""

    slice_name: str
    rows: NDArray[np.int64]
    layers: dict[int, LayerInputs]


class GateValues(NamedTuple):
    """Attention gates.

    Attributes
    ----------
    mean
        Mean gate of each head, (n_cells, L, H).
    summary
        Mean and standard deviation over cells and channels, (L, H, 2).
    """

    mean: NDArray[np.float32]
    summary: NDArray[np.float64]


class SinkValues(NamedTuple):
    """Attention that cells receive.

    Attributes
    ----------
    received
        Attention that each cell receives, mean over query cells and heads, (n_cells, L).
    slices
        Name of the slice of each context.
    n_cells
        Number of cells of each context, (C,).
    share
        Largest mean attention that a cell of the context receives, (C, L, H).
    """

    received: NDArray[np.float32]
    slices: list[str]
    n_cells: NDArray[np.int64]
    share: NDArray[np.float64]


class ExpertValues(NamedTuple):
    """Expert usage.

    Attributes
    ----------
    first
        The most probable expert of each cell, (n_cells, L).
    usage, probability
        Fraction of all assignments to each expert, and its mean routing probability, (L, E).
    """

    first: NDArray[np.int64]
    usage: NDArray[np.float64]
    probability: NDArray[np.float64]


def query_source(sampler: Sampler, adata: AnnData) -> AnnDataSource:
    """The cells without their positions, as input of the network."""
    return AnnDataSource(adata, sampler.schema, positions=False)


@torch.no_grad()
def record_contexts(sampler: Sampler, source: AnnDataSource) -> Iterator[RecordedContext]:
    """Run the network on each context and yield the inputs of its layers; a cell may be in several contexts."""
    module, device = sampler.module, sampler.device
    zero, one = torch.zeros(1, device=device), torch.ones(1, device=device)
    for cells in source.slices:
        rows = content_order(source, cells.rows)
        encoded, _, contexts, order = encode_cells(module, source, rows, max_context=MAX_CONTEXT)
        for index, _ in contexts:
            with watch_layers(module) as layers:
                h, sequence = encoded[index][None], None if order is None else order[index][None]
                module.trunk(h + module.position_missing, zero, one, None, (), sequence=sequence)
            yield RecordedContext(cells.name, rows[index.cpu().numpy()], layers)


@torch.no_grad()
def gate_values(sampler: Sampler, source: AnnDataSource) -> GateValues:
    """Gates of all cells."""
    config = sampler.module.config
    if config.attention == "linear" or config.gate_type == "none":
        raise ValueError(
            f"the attention of this model has no gates (attention={config.attention!r}, gate_type={config.gate_type!r})"
        )
    shape = (source.n_cells, config.n_layers, config.n_heads)
    mean, square = np.zeros(shape), np.zeros(shape)
    for context in record_contexts(sampler, source):
        for i, layer in context.layers.items():
            gates = layer.attention.gates(layer.x)
            assert gates is not None  # checked above
            heads = gates[0].cpu().double().view(len(context.rows), config.n_heads, -1)
            mean[context.rows, i] = heads.mean(-1)
            square[context.rows, i] = heads.square().mean(-1)
    average = mean.mean(0)
    sd = np.sqrt(np.maximum(square.mean(0) - average**2, 0))
    return GateValues(mean.astype(np.float32), np.stack([average, sd], axis=-1))


@torch.no_grad()
def sink_values(sampler: Sampler, source: AnnDataSource) -> SinkValues:
    """Attention that all cells receive, computed in blocks of rows of the attention matrix."""
    config = sampler.module.config
    received = np.zeros((source.n_cells, config.n_layers), dtype=np.float32)
    slices, sizes, shares = [], [], []
    for context in record_contexts(sampler, source):
        by_layer = [layer.attention.received(layer.x, layer.geometry)[0] for _, layer in sorted(context.layers.items())]
        for i, values in enumerate(by_layer):
            received[context.rows, i] = values.mean(0).cpu()
        slices.append(context.slice_name)
        sizes.append(len(context.rows))
        shares.append([values.max(dim=1).values.tolist() for values in by_layer])
    return SinkValues(received, slices, np.array(sizes), np.array(shares, dtype=np.float64))


@torch.no_grad()
def attention_rows(
    sampler: Sampler, source: AnnDataSource, cells: NDArray[np.int64], *, layer: int, head: int | None
) -> NDArray[np.float32]:
    """Attention weights of ``cells`` (M,), (n_cells, M); NaN for cells of other contexts.

    Of several contexts that share a cell, the first is used.
    """
    result = np.full((source.n_cells, len(cells)), np.nan, dtype=np.float32)
    for context in record_contexts(sampler, source):
        selected = np.flatnonzero(np.isin(cells, context.rows) & np.isnan(result).all(axis=0))
        if not len(selected):
            continue
        number = {row: i for i, row in enumerate(context.rows.tolist())}
        seen = context.layers[layer]
        rows = torch.tensor([number[int(cells[i])] for i in selected], device=seen.x.device)
        weights = seen.attention.weights(seen.x, rows, seen.geometry)[0]  # (H, R, N)
        weights = weights.mean(0) if head is None else weights[head]
        result[np.ix_(context.rows, selected)] = weights.T.cpu()
    return result


@torch.no_grad()
def expert_values(sampler: Sampler, source: AnnDataSource) -> ExpertValues:
    """Expert routing of all cells."""
    config = sampler.module.config
    if not config.use_moe:
        raise ValueError("this model has no experts; train a model with use_moe=True")
    first = np.zeros((source.n_cells, config.n_layers), dtype=np.int64)
    shape = (source.n_cells, config.n_layers, config.num_experts)
    assigned, probability = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    for context in record_contexts(sampler, source):
        for i, layer in context.layers.items():
            routing: Any = layer.routing
            first[context.rows, i] = routing.probability[0].argmax(dim=1).cpu()
            assigned[context.rows, i] = routing.assigned[0].cpu()
            probability[context.rows, i] = routing.probability[0].cpu()
    usage = assigned.mean(0, dtype=np.float64) / config.moe_top_k
    return ExpertValues(first, usage, probability.mean(0, dtype=np.float64))
