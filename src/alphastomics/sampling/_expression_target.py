"""What samples of expression at positions of the reference should have in common with its cells.

It is read from the reference after the training. The statistics of samples (:mod:`alphastomics.sampling._fit_expression`) are fitted to it
when expression is sampled for the first time, without the reference, because this takes about as long as a tenth of a training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.data import local_density
from alphastomics.data._local_density import RANKS
from alphastomics.sampling._canonical import canonical_mean, reference_positions
from alphastomics.sampling._cells import encode_cells
from alphastomics.sampling._expression import ExpressionSampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.sampling._sampler import Sampler

Part = tuple["SliceCells", "NDArray[np.int64]"]  # a slice of the reference, and indices of cells in it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpressionTarget:
    """Positions at which expression is sampled, and a statistic of the reference that the samples should have.

    Parameters
    ----------
    value
        Values (L, G) of the statistic in network units.
    position
        Positions (N, D) of cells in the canonical frame and model units.
    local_density
        Local density (N, K) of the cells in their slices.
    sequence
        Index (N,) of the cells in their order; 0 without one.
    context
        Number of the context of each cell (N,); integers, stored as floating-point numbers like every tensor of a model.
    """

    value: NDArray[np.float32]
    position: NDArray[np.float32]
    local_density: NDArray[np.float32]
    sequence: NDArray[np.float32]
    context: NDArray[np.float32]

    @classmethod
    def of_cells(
        cls, value: NDArray[np.floating], sampler: Sampler, source: CellSource, parts: Sequence[Part]
    ) -> ExpressionTarget:
        """With the positions of some cells of ``source``, the reference, with positions; the cells of a slice are one context."""
        arrays = [_describe(sampler, source, *part) for part in parts]
        position, density, sequence = (np.concatenate(each).astype(np.float32) for each in zip(*arrays, strict=True))
        context = np.repeat(np.arange(len(parts)), [len(index) for _, index in parts])
        return cls(
            value=value.astype(np.float32),
            position=position,
            local_density=density,
            sequence=sequence,
            context=context.astype(np.float32),
        )

    def is_valid(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shapes match the numbers of genes and dimensions."""
        n = len(self.position)
        return (
            self.value.ndim == 2
            and self.value.shape[1] == n_genes
            and self.position.shape == (n, n_dims)
            and self.local_density.shape == (n, len(RANKS))
            and self.sequence.shape == self.context.shape == (n,)
        )

    def samplers(self, sampler: Sampler) -> Iterator[tuple[ExpressionSampler, NDArray[np.float32]]]:
        """For each context a sampler of the expression of its cells, and their positions."""
        for number in np.unique(self.context):
            cells = self.context == number
            position, density, sequence = (x[cells] for x in (self.position, self.local_density, self.sequence))
            expression = ExpressionSampler(
                sampler,
                torch.from_numpy(position).to(sampler.device),
                max_context=len(position),
                local_density=torch.from_numpy(density).to(sampler.device),
                sequence=torch.from_numpy(sequence).to(sampler.device)
                if sampler.module.config.reads_sequence
                else None,
            )
            yield expression, position


def _describe(
    sampler: Sampler, source: CellSource, cells: SliceCells, index: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Position (n, D), local density (n, K) and order (n,) of cells of a slice."""
    assert cells.position is not None  # a training source reads them
    encoded = encode_cells(sampler.module, source, cells.rows[index], max_context=len(index))
    order = np.zeros(len(index), dtype=np.float32) if encoded.sequence is None else encoded.sequence.cpu().numpy()
    position = reference_positions(sampler, cells, index, canonical_mean(sampler, encoded))
    return position, local_density(cells.position, index), order
