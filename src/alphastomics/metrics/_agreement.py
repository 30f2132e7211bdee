r"""Agreement of the two modalities of a sampled tissue, measured by the relation of expression and position in a real slice.

The cells of a sampled tissue have no true position. A real slice predicts one from their expression:

.. math::

    \hat p(x) = \frac1k \sum_{j \in \mathrm{kNN}(x)} p_j, \qquad
    A = \operatorname{mean}_i \; \rho\bigl( \lVert p_i - p_\cdot \rVert,\; \lVert \hat p(x_i) - \hat p(x_\cdot) \rVert \bigr)

where the neighbors :math:`j` of an expression :math:`x` are the reference cells nearest to it in the reference's
principal components, and :math:`\rho` is Spearman's correlation of the distances from cell :math:`i` to all others.

A measures the relation of the modalities and not their marginal distributions: permuting the positions changes only the
relation, and A becomes 0. It does not depend on the frame, the unit or the number of cells. Two alternatives are worse:
statistics of smoothness, such as the correlation of a cell with its spatial neighbors, ignore the reference, and patches at
wrong positions are smooth as well; a classifier of real and sampled cells mostly detects batch effects.

A real slice scores below 1, because expression determines the position of a cell only in part: the ceiling is the score of
real held-out slices. A sample can exceed it if its expression is less noisy than that of real cells;
:func:`variance_ratio_per_gene` is then below 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsRegressor

from alphastomics.metrics._distances import distance_spearman
from alphastomics.metrics._matrix import Matrix, as_rows, gene_blocks

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

N_COMPONENTS, N_NEIGHBORS = 30, 25
N_ROWS = 500  # cells whose distances are ranked: standard error near 0.01, a quarter of the time of 2,000


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionRegressor:
    """Position that one reference slice predicts from expression: the mean of the nearest cells in its components."""

    components: PCA
    regressor: KNeighborsRegressor

    @classmethod
    def fit(
        cls, expression: Any, positions: ArrayLike, *, n_components: int, n_neighbors: int, random_state: int
    ) -> PositionRegressor:
        """Fit to the cells of one slice; see :func:`modality_agreement`."""
        matrix, points = _check_tissue(expression, positions, "reference")
        if not any(np.ptp(block, axis=0).any() for _, block in gene_blocks(matrix)):
            raise ValueError("the expression of the reference is the same in all cells; pass another slice")
        n_components = min(n_components, min(matrix.shape) - 1)
        if n_components < 1 or not 1 <= n_neighbors <= len(points):
            raise ValueError(
                f"the reference has {matrix.shape[0]} cells and {matrix.shape[1]} genes; it needs at least two of each "
                f"and n_neighbors={n_neighbors} cells"
            )
        components = PCA(n_components, svd_solver="arpack", random_state=random_state)
        scores = components.fit_transform(matrix)
        regressor = KNeighborsRegressor(n_neighbors, algorithm="brute").fit(scores, points)
        return cls(components=components, regressor=regressor)

    def agreement(self, expression: Any, positions: ArrayLike, *, random_state: int) -> float:
        """Agreement of a tissue with this slice; see :func:`modality_agreement`."""
        matrix, points = _check_tissue(expression, positions, "sample")
        if len(points) < 2:
            return float("nan")
        # The sample is passed as the prediction, so that a sample that is a single point scores 0, not NaN.
        return distance_spearman(self.predict(matrix), points, n_rows=N_ROWS, random_state=random_state)

    def predict(self, expression: Matrix) -> NDArray[np.float64]:
        """Predicted positions in the frame of the slice, (n_cells, n_dims)."""
        return np.asarray(self.regressor.predict(self.components.transform(expression)), dtype=np.float64)


def _check_tissue(expression: Any, positions: ArrayLike, name: str) -> tuple[Matrix, NDArray[np.float64]]:
    matrix, points = as_rows(expression), np.asarray(positions, dtype=np.float64)
    if points.ndim != 2 or len(points) != matrix.shape[0]:
        raise ValueError(f"{name}: there are {matrix.shape[0]} cells and positions of shape {points.shape}")
    return matrix, points


def modality_agreement(
    expression: Any,
    positions: ArrayLike,
    reference_expression: Any,
    reference_positions: ArrayLike,
    *,
    n_components: int = N_COMPONENTS,
    n_neighbors: int = N_NEIGHBORS,
    random_state: int = 0,
) -> float:
    """Agreement of expression and position in a sampled tissue, computed from one real slice.

    The reference predicts a position for each sampled cell: the mean position of the ``n_neighbors`` reference cells with the
    most similar expression. The agreement is the mean over cells of the Spearman correlation between their distances to the
    other cells in the sample and the distances between the predicted positions.

    Parameters
    ----------
    expression
        Expression of the sample, (n_cells, n_genes), sparse or dense.
    positions
        Positions of the sample, (n_cells, n_dims), in any frame and unit.
    reference_expression
        Expression of the slice, of the same genes and on the same scale, (n_reference_cells, n_genes).
    reference_positions
        Positions of the slice, (n_reference_cells, n_dims).
    n_components
        Principal components of the reference in which neighbors are found.
    n_neighbors
        Reference cells whose positions are averaged.
    random_state
        Seed of the decomposition and of the choice of at most 500 cells whose distances are ranked.

    Returns
    -------
    The agreement, in [-1, 1]: 0 for permuted positions; the ceiling is the score of a real held-out slice against the same
    reference. NaN for fewer than two cells.

    Raises
    ------
    ValueError
        If shapes do not match, a value is not finite, or the reference is too small.
    """
    reference = PositionRegressor.fit(
        reference_expression,
        reference_positions,
        n_components=n_components,
        n_neighbors=n_neighbors,
        random_state=random_state,
    )
    return reference.agreement(expression, positions, random_state=random_state)
