r"""Sampled expression with the marginals of the reference.

.. math:: x_{ig} \leftarrow Q_g\big(F_g(x_{ig})\big)

with :math:`Q_g` the quantile function of gene g in the reference and :math:`F_g` the distribution of what the trained
model samples at the same cells' positions. The map is monotone: it moves no cell past another, and a query that differs
from the reference keeps its difference. It gives counts back what a short chain of Gaussian steps smooths away, the many
zeros above all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

LEVELS = np.unique(np.concatenate([np.linspace(0, 1, 65), 1 - np.logspace(-3, -1.5, 12)]))
"""Where quantiles are taken: finer at the top, which holds the cells that express a gene."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Marginals:
    """Quantiles of every gene in network units.

    Parameters
    ----------
    sampled, true
        (K, G), ascending along K.
    """

    sampled: NDArray[np.float32]
    true: NDArray[np.float32]

    @classmethod
    def of(cls, sampled: ArrayLike, true: ArrayLike) -> Marginals:
        """Quantiles of samples (M, G) and of cells (N, G)."""
        quantiles = (np.quantile(np.asarray(x, dtype=np.float64), LEVELS, axis=0) for x in (sampled, true))
        return cls(**dict(zip(("sampled", "true"), (q.astype(np.float32) for q in quantiles), strict=True)))

    def fits(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shapes are those of a tissue of so many genes and axes."""
        return self.sampled.shape == self.true.shape == (len(LEVELS), n_genes)

    def apply(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map values (N, G) that the model sampled."""
        columns = [np.interp(x[:, g], self.sampled[:, g], self.true[:, g]) for g in range(x.shape[1])]
        return np.stack(columns, axis=1).astype(np.float32)
