r"""What alike cells of the reference tell of the unknown genes of a cell, beyond what the network made of them.

.. math::

    \delta_{ig} = a\, \Big(\frac1k \sum_{j \in N_i} x_{jg} - m_{ig}\Big), \qquad
    s_i = (W_i^\top W_i + \sigma^2 I)^{-1}\, W_i^\top x_i

m is the network's mean; :math:`N_i` are the k exemplars, cells kept of the reference, whose principal components are nearest
to those of cell i. These are estimated from its known genes: W are the scaled components, :math:`W_i` their rows of known
genes, :math:`\sigma^2` the variance that the components leave (Tipping & Bishop 1999, J. R. Stat. Soc. B 61:611). The share a
is that of least squared error over known values that were left out. A network that was trained for minutes smooths over what
is rare; its neighbors know it, and the two err differently (Khandelwal et al. 2020, ICLR, of language).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.utils import gen_batches

from alphastomics.sampling._frames import evenly_spaced_indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import CellSource

MOST_CELLS, MOST_VALUES = 8192, 2**23  # that are kept of the reference
N_COMPONENTS = 32
N_NEIGHBORS = 50
CHUNK = 2048  # cells whose components are solved for at once


class _Components(NamedTuple):
    """The scaled components W (G, K), their scales (K,), the mean (G,), and the variance that they leave."""

    loadings: NDArray[np.floating]
    scale: NDArray[np.floating]
    mean: NDArray[np.floating]
    noise: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Exemplars:
    """Cells of the reference.

    Parameters
    ----------
    expression
        In network units, (M, G).
    """

    expression: NDArray[np.float32]

    @classmethod
    def of(cls, source: CellSource) -> Exemplars:
        """Cells from all over a reference: 8,192, or as many as make eight million values."""
        most = max(1, min(MOST_CELLS, MOST_VALUES // len(source.measured)))
        return cls(expression=source.expression(evenly_spaced_indices(source.n_cells, most)))

    def fits(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shape is that of a tissue of so many genes and axes."""
        return 0 < len(self.expression) <= MOST_CELLS and self.expression.shape == (len(self.expression), n_genes)

    @cached_property
    def _components(self) -> _Components:
        # In single precision what is solved for depends on the order of the sums, where the components leave next to nothing.
        pca = PCA(min(N_COMPONENTS, *self.expression.shape), random_state=0).fit(self.expression.astype(np.float64))
        noise = max(float(pca.noise_variance_), 1e-6)
        scale = np.sqrt(np.maximum(pca.explained_variance_ - noise, 0.0))
        return _Components((pca.components_ * scale[:, None]).T, scale, pca.mean_, noise)

    def alike(self, value: NDArray[np.float32], known: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Mean expression (N, G) of the exemplars that are nearest to cells of which only some values are ``known``.

        Parameters
        ----------
        value
            Expression in network units, (N, G); only known values are read.
        known
            Which values are known, (N, G).
        """
        loadings, scale, mean, noise = self._components
        # Without the genes that no cell has: both sides are then shrunken alike.
        there = np.atleast_2d(known.any(axis=0))
        of_exemplars = _scores(self.expression - mean, there, loadings, noise) * scale
        of_cells = _scores(value - mean, known, loadings, noise) * scale
        k = min(N_NEIGHBORS, len(of_exemplars))
        near = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(of_exemplars).kneighbors(of_cells)[1]
        total = np.zeros(value.shape)
        for rank in near.T:  # never (N, k, G)
            total += self.expression[rank]
        return (total / k).astype(np.float32)


def _scores(
    x: NDArray[np.floating], known: NDArray[np.bool_], loadings: NDArray[np.floating], noise: float
) -> NDArray[np.floating]:
    """Posterior mean s (N, K) given the known values of ``x`` (N, G); ``known`` is (N, G), or (1, G) for all cells."""
    n_genes, k = loadings.shape
    seen = np.where(known, x, 0.0) @ loadings
    prior = noise * np.eye(k)
    if len(known) == 1:
        return np.linalg.solve((loadings * known.T).T @ loadings + prior, seen.T).T
    outer = (loadings[:, :, None] * loadings[:, None, :]).reshape(n_genes, k * k)
    solved = [
        np.linalg.solve((known[rows] @ outer).reshape(-1, k, k) + prior, seen[rows][..., None])[..., 0]
        for rows in gen_batches(len(x), CHUNK)
    ]
    return np.concatenate(solved)
