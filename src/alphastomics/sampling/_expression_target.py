"""What samples of expression at positions of the reference should have in common with its cells.

It is read from the reference after the training. The statistics of samples are fitted to it when expression is first sampled
(:mod:`alphastomics.sampling._fit_expression`), without the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from alphastomics.data._local_density import RANKS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
