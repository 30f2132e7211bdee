r"""The outline of a tissue: the density of cells of a reference slice, met by a draw.

.. math:: x \leftarrow x + \theta\,\big(Q_\theta(F_\theta(\theta^\top x)) - \theta^\top x\big), \qquad \theta = \theta_1, \dots, \theta_M, \theta_1, \dots

with :math:`Q_\theta` the quantile function of the reference slice along the direction :math:`\theta` and
:math:`F_\theta` the distribution of the draw: sliced optimal transport (Pitié et al. 2005, ICCV). Positions that were drawn
about uncertain means have tails where tissue has an edge. The map is smooth: what lies side by side stays so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alphastomics.nn.embeddings import directions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

N_DIRECTIONS = 8  # in two dimensions, twice as many in three
N_SWEEPS = 8
LEVELS = np.linspace(0, 1, 129)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outlines:
    """Quantiles of the positions of reference slices along fixed directions.

    Parameters
    ----------
    quantiles
        (S, M, L) for S slices, M directions and L levels, in the canonical frame and model units.
    """

    quantiles: NDArray[np.float32]

    @classmethod
    def of(cls, slices: Sequence[NDArray[np.float32]]) -> Outlines:
        """Outlines of slices of positions (n, D)."""
        n_dims = slices[0].shape[1]
        axes = directions(N_DIRECTIONS * (n_dims - 1), n_dims).numpy()
        quantiles = [np.quantile(x.astype(np.float64) @ axes.T, LEVELS, axis=0).T for x in slices]
        return cls(quantiles=np.stack(quantiles).astype(np.float32))

    def fits(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shape is that of a tissue of so many genes and axes."""
        return 0 < len(self.quantiles) and self.quantiles.shape == (
            len(self.quantiles),
            N_DIRECTIONS * (n_dims - 1),
            len(LEVELS),
        )

    def apply(self, x: NDArray[np.float32], number: int) -> NDArray[np.float32]:
        """Move positions (N, D) into the outline of the slice ``number``."""
        y, targets = x.astype(np.float64), self.quantiles[number].astype(np.float64)
        axes = directions(len(targets), x.shape[1]).numpy()
        for _ in range(N_SWEEPS):
            for axis, target in zip(axes, targets, strict=True):
                along = y @ axis
                level = (np.argsort(np.argsort(along, kind="stable")) + 0.5) / len(y)
                y += (np.interp(level, LEVELS, target) - along)[:, None] * axis
        return y.astype(np.float32)
