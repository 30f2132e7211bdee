"""Reference cells that are stored with a model: their positions, neighborhood embeddings and expression.

Draws of positions retrieve them (:mod:`alphastomics.sampling._retrieval`), partly observed cells are completed from similar ones
(:mod:`alphastomics.sampling._completion`), and new slices are drawn from them (:mod:`alphastomics.sampling._joint`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from alphastomics.sampling._completion import Exemplars

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SLICES, MAX_CELLS = 16, 8192
MAX_VALUES = 2**23  # of expression, 32 MiB


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceCells:
    """Cells of the reference, evenly spaced in the order of the rows of each slice.

    Parameters
    ----------
    position
        Positions (M, D) in the canonical frame and model units.
    slice
        Number of the slice of each cell (M,); integers, stored as floating-point numbers like every tensor of a model.
    feature
        Neighborhood embedding (M, K), unit vectors; K = 0 for a model that does not sample positions given expression.
    cell_feature
        Neighborhood embedding (M, K) of each cell alone, unit vectors.
    expression
        Expression (M, G) in network units.
    sequence
        Index (M,) of the cells in their order, from 0 in each slice; 0 for all cells if the network reads none.
    """

    position: NDArray[np.float32]
    slice: NDArray[np.float32]
    feature: NDArray[np.float32]
    cell_feature: NDArray[np.float32]
    expression: NDArray[np.float32]
    sequence: NDArray[np.float32]

    def is_valid(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shapes match the numbers of genes and dimensions."""
        n = len(self.position)
        return (
            0 < n <= MAX_CELLS
            and self.position.shape == (n, n_dims)
            and self.slice.shape == (n,)
            and self.feature.ndim == 2
            and len(self.feature) == n
            and self.cell_feature.shape == self.feature.shape
            and self.expression.shape == (n, n_genes)
            and self.sequence.shape == (n,)
        )

    @property
    def joint_feature(self) -> NDArray[np.float32]:
        """Both embeddings (M, 2 K), unit vectors: products are the mean of those of the two."""
        return (np.concatenate([self.feature, self.cell_feature], axis=1) / 2**0.5).astype(np.float32)

    @cached_property
    def exemplars(self) -> Exemplars:
        """The cells as exemplars of expression."""
        return Exemplars(expression=self.expression)
