r"""Moran's I: spatial autocorrelation of each gene on the graph of nearest neighbors.

.. math::

    I_g = \frac{n}{S_0} \frac{\sum_{ij} w_{ij} (x_{ig} - \bar x_g)(x_{jg} - \bar x_g)}{\sum_i (x_{ig} - \bar x_g)^2},
    \qquad w_{ij} = \begin{cases} 1/k & j \in \mathrm{kNN}(i) \\ 0 & \text{otherwise} \end{cases},
    \qquad S_0 = \sum_{ij} w_{ij} = n

(Moran 1950): near 1 for a gene that varies smoothly in space, :math:`-1/(n-1)` on average for one that is independent of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from alphastomics.metrics._matrix import as_rows, gene_blocks, measured_genes
from alphastomics.metrics._neighbors import nearest_cells

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

N_NEIGHBORS = 6


def morans_i(expression: Any, positions: ArrayLike, *, n_neighbors: int = N_NEIGHBORS) -> NDArray[np.float64]:
    """Moran's I of every gene on the graph of nearest neighbors, with rows that sum to 1.

    Equals :func:`squidpy.gr.spatial_autocorr` (``mode="moran"``) on :func:`squidpy.gr.spatial_neighbors` with the same
    number of neighbors. Genes are converted to dense arrays one block at a time.

    Parameters
    ----------
    expression
        Expression, (n_cells, n_genes), sparse or dense; a gene that is NaN in every cell is unmeasured.
    positions
        Positions of the same cells, (n_cells, n_dims), in any unit.
    n_neighbors
        Neighbors of each cell, at least 1 and less than the number of cells. Ties for the last place are broken
        arbitrarily.

    Returns
    -------
    One value per gene, (n_genes,); NaN for a gene that is constant or unmeasured.

    Raises
    ------
    ValueError
        If there is not one position per cell, a value is not finite, or ``n_neighbors`` is out of range.
    """
    matrix = as_rows(expression)
    weights = _weights(positions, matrix.shape[0], n_neighbors)
    measured = measured_genes(matrix)
    result = np.full(matrix.shape[1], np.nan)
    for genes, block in gene_blocks(matrix):
        varies = measured[genes] & (block.max(axis=0) > block.min(axis=0))
        z = block[:, varies]
        z -= z.mean(axis=0)
        result[genes][varies] = np.einsum("ij,ij->j", z, weights @ z) / np.einsum("ij,ij->j", z, z)
    return result


def _weights(positions: ArrayLike, n_cells: int, n_neighbors: int) -> sp.csr_array:
    """Weights (n_cells, n_cells) of the neighbors of each cell; rows sum to 1."""
    points = np.asarray(positions, dtype=np.float64)
    if points.ndim != 2 or len(points) != n_cells:
        raise ValueError(f"positions must be of shape ({n_cells}, n_dims), one per cell, got {points.shape}")
    if not np.isfinite(points).all():
        raise ValueError("positions must be finite; leave cells without one out")
    if not 1 <= n_neighbors < n_cells:
        raise ValueError(f"n_neighbors={n_neighbors} must be at least 1 and less than the number of cells, {n_cells}")
    neighbors, _ = nearest_cells(points, n_neighbors)
    starts = np.arange(0, n_cells * n_neighbors + 1, n_neighbors)
    values = np.full(n_cells * n_neighbors, 1 / n_neighbors)
    return sp.csr_array((values, neighbors.ravel(), starts), shape=(n_cells, n_cells))


def moran_correlation(
    true: Any,
    true_positions: ArrayLike,
    predicted: Any,
    predicted_positions: ArrayLike,
    *,
    n_neighbors: int = N_NEIGHBORS,
) -> float:
    """Pearson correlation over genes between Moran's I in the truth and in the prediction.

    The correlation is high if the genes with a spatial pattern in the truth, and only these, have one in the prediction.
    Frames and numbers of cells may differ between truth and prediction.

    Parameters
    ----------
    true
        True expression, (n_cells, n_genes), sparse or dense.
    true_positions
        Positions of the true cells, (n_cells, n_dims).
    predicted
        Predicted expression of the same genes, (n_predicted_cells, n_genes).
    predicted_positions
        Positions of the predicted cells, (n_predicted_cells, n_dims).
    n_neighbors
        Neighbors of each cell.

    Returns
    -------
    The correlation over the genes that vary in both; NaN for fewer than two such genes.

    Raises
    ------
    ValueError
        If the genes differ in number, or :func:`morans_i` raises an error for either side.
    """
    pair = [
        morans_i(expression, positions, n_neighbors=n_neighbors)
        for expression, positions in ((true, true_positions), (predicted, predicted_positions))
    ]
    return correlate_genes(*pair)


def correlate_genes(true: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Pearson correlation of two values per gene, over the genes for which neither is NaN."""
    if true.shape != predicted.shape:
        raise ValueError(f"truth and prediction have {len(true)} and {len(predicted)} genes; give them the same genes")
    both = ~np.isnan(true) & ~np.isnan(predicted)
    y, x = true[both], predicted[both]
    if len(y) < 2 or y.max() == y.min() or x.max() == x.min():
        return float("nan")
    return float(np.corrcoef(y, x)[0, 1])
