"""Input of the network: order and embedding of cells, and the contexts that cover a large slice."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import CellSource
    from alphastomics.nn import Denoiser

ROWS = 4096  # cells whose expression is dense at the same time
ANCHOR_SHARE = 0.25  # of a context

Contexts = list[tuple[Tensor, int]]  # indices of cells, and the number of anchors among them
GeneScaling = tuple["NDArray[np.float32]", "NDArray[np.float32]"]  # gain and offset (G,) of the genes, in network units


class EncodedCells(NamedTuple):
    """Cells of one slice as input of the network.

    Attributes
    ----------
    embedding
        Embedding of clean expression, (N, d).
    cell_feature
        Neighborhood embedding of each cell alone, unit vectors (N, K).
    contexts
        Contexts that cover the cells, see :func:`split_contexts`.
    sequence
        Index of the cells in their order, (N,); None if the network reads none.
    """

    embedding: Tensor
    cell_feature: Tensor
    contexts: Contexts
    sequence: Tensor | None = None


def unchanged(source: CellSource) -> GeneScaling:
    """Gain and offset (G,) of the measured genes, which are scaled up for the others."""
    gain = (source.measured / np.sqrt(source.measured.mean())).astype(np.float32)
    return gain, np.zeros_like(gain)


def evenly_spaced_indices(n: int, n_max: int) -> NDArray[np.int64]:
    """At most ``n_max`` evenly spaced indices in [0, n)."""
    return np.linspace(0, n - 1, min(n_max, n)).astype(np.int64)


def content_order(source: CellSource, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """``rows`` sorted by a hash of their expression; rows of equal expression keep their order.

    Sums over cells and the noise of a cell then do not depend on the order of the rows: permuting the rows permutes the
    result, to the bit.
    """
    return rows[np.argsort(content_hash(source, rows), kind="stable")]


def content_hash(source: CellSource, rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash (n,) of the expression of cells."""
    weights = np.random.default_rng(0).integers(1, 2**63, size=source.schema.n_genes, dtype=np.uint64)
    return np.concatenate(
        [
            (np.ascontiguousarray(source.expression(block)).view(np.uint32).astype(np.uint64) * weights).sum(1)
            for block in _blocks(rows)
        ]
    )


def _blocks(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]


def read_expression(source: CellSource, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Expression (n, G) of cells, read in blocks of rows."""
    return np.concatenate([source.expression(block) for block in _blocks(rows)])


def encode_cells(
    module: Denoiser,
    source: CellSource,
    rows: NDArray[np.int64],
    *,
    max_context: int,
    change: GeneScaling | None = None,
) -> EncodedCells:
    """Read cells, with a ``change`` of their genes if one is given."""
    embedding, cell_feature = embed_cells(module, source, rows, change)
    return EncodedCells(
        embedding=embedding,
        cell_feature=cell_feature,
        contexts=split_contexts(len(rows), max_context, module.device),
        sequence=cell_order(module, source, rows),
    )


@torch.no_grad()
def embed_cells(
    module: Denoiser, source: CellSource, rows: NDArray[np.int64], change: GeneScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Embeddings of cells, computed in blocks of rows.

    These are the embedding (N, d) of clean expression and, if they are an input, of cell types, and the neighborhood embedding (N, K) of
    each cell alone, unit vectors. Without a ``change`` all measured genes are used.
    """
    zero = torch.zeros(1, device=module.device)
    gain, offset = unchanged(source) if change is None else change
    embedding, feature = [], []
    for block in _blocks(rows):
        expression = torch.from_numpy(source.expression(block) * gain + offset).to(module.device)[None]
        h = module.embed_expression(expression, zero)
        if module.config.n_cell_types:
            h = h + module.embed_cell_type(torch.from_numpy(source.cell_type(block)).to(module.device)[None], zero)
        embedding.append(h[0])
        feature.append(F.normalize(module.cell_neighborhood(expression)[0].float(), dim=-1))
    return torch.cat(embedding), torch.cat(feature)


def cell_order(module: Denoiser, source: CellSource, rows: NDArray[np.int64]) -> Tensor | None:
    """Index (N,) of cells in their order, from 0; None if the network reads no order."""
    if not module.config.reads_sequence:
        return None
    order = source.sequence(rows)
    if order is None:
        raise KeyError(
            f'obs["{source.schema.sequence_key}"] is missing; add this column, because the model was set up with '
            f'sequence_key="{source.schema.sequence_key}"'
        )
    return torch.from_numpy((order - order.min()).astype(np.float32)).to(module.device)


def split_contexts(n_cells: int, max_context: int, device: torch.device) -> Contexts:
    """Contexts that cover all cells: indices of the cells, and the number of anchors, which come first and are shared."""
    every = torch.arange(n_cells, device=device)
    if n_cells <= max_context:
        return [(every, 0)]
    n_anchors = int(ANCHOR_SHARE * max_context)
    anchors, rest = every[:n_anchors], every[n_anchors:]
    n_blocks = -(-len(rest) // (max_context - n_anchors))
    return [(torch.cat([anchors, block]), n_anchors) for block in rest.tensor_split(n_blocks)]


def random_contexts(n_cells: int, max_context: int, device: torch.device) -> list[Tensor]:
    """Contexts of :func:`split_contexts` for cells in random order, as indices of the cells, ascending."""
    order = torch.randperm(n_cells, generator=torch.Generator().manual_seed(0)).to(device)
    return [order[index].sort().values for index, _ in split_contexts(n_cells, max_context, device)]
