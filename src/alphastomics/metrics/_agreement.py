r"""Agreement of the two modalities: are the cells where the reference has cells of their expression?

A sampled tissue has no true position for each of its cells. What a real slice says is how expression goes with place:

.. math::

    \hat p(x) = \frac1k \sum_{j \in \mathrm{kNN}(x)} p_j, \qquad
    A = \operatorname{mean}_i \; \rho\bigl( \lVert p_i - p_\cdot \rVert,\; \lVert \hat p(x_i) - \hat p(x_\cdot) \rVert \bigr)

where the neighbors :math:`j` of an expression :math:`x` are the reference cells nearest to it in the reference's
principal components, and :math:`\rho` is Spearman's correlation of the distances from cell :math:`i` to all others.

Why this one. It asks about the relation and not about either modality alone: permuting positions leaves both marginal
distributions as they are and takes it to 0. It depends on no frame, unit or number of cells. A statistic of smoothness,
such as the correlation of a cell with its spatial neighbors, does not ask for the reference at all: patches in the
wrong places are smooth too. A classifier of real against sampled answers first of all to batch effects.

It is not 1 for a real slice, because expression tells the place of a cell only in part: the ceiling is what real
held-out slices score. A sample can score above it when its expression is less noisy than that of real cells;
:func:`variance_ratio_per_gene` then lies below 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsRegressor

from alphastomics.metrics._distances import distance_spearman
from alphastomics.metrics._matrix import Matrix, as_rows

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

N_ROWS = 500  # cells from which distances are ranked: a standard error near .01, a quarter of the time of 2,000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceOfExpression:
    """The position that one reference slice gives to an expression.

    Parameters
    ----------
    components
        Principal components of the reference.
    regressor
        Mean position of the nearest reference cells there.
    """

    components: PCA
    regressor: KNeighborsRegressor

    @classmethod
    def fit(
        cls, expression: Any, positions: ArrayLike, *, n_components: int, n_neighbors: int, random_state: int
    ) -> PlaceOfExpression:
        """Learn it from the cells of one slice; see :func:`modality_agreement`."""
        matrix, points = _check_tissue(expression, positions, "reference")
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
        # A sample that is one point is not without a score: as the prediction it scores 0.
        return distance_spearman(self.place(matrix), points, n_rows=N_ROWS, random_state=random_state)

    def place(self, expression: Matrix) -> NDArray[np.float64]:
        """Positions of expressions in the frame of the slice, (n_cells, n_dims)."""
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
    n_components: int = 30,
    n_neighbors: int = 25,
    random_state: int = 0,
) -> float:
    """Agreement of a sampled tissue with one real slice about how expression goes with position.

    The Spearman correlation, mean over cells, between the distances to the other cells in the sample and those between
    the places that the reference gives to their expression: the mean position of the `n_neighbors` reference cells
    whose expression is nearest.

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
        Principal components of the reference in which neighbors are sought.
    n_neighbors
        Reference cells whose positions are averaged.
    random_state
        Seed of the decomposition and of the choice of at most 500 cells from which distances are ranked.

    Returns
    -------
    The agreement, in [-1, 1]. Floor: 0, the sample with its positions permuted. Ceiling: what a real held-out slice
    scores against the same reference. NaN for fewer than two cells.

    Raises
    ------
    ValueError
        If shapes do not match, a value is not finite, or the reference is too small.
    """
    reference = PlaceOfExpression.fit(
        reference_expression,
        reference_positions,
        n_components=n_components,
        n_neighbors=n_neighbors,
        random_state=random_state,
    )
    return reference.agreement(expression, positions, random_state=random_state)
