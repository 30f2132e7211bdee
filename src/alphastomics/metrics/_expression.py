r"""Scores of predicted expression, computed in blocks of cells.

With the truth :math:`y` and the prediction :math:`x`, cells :math:`i` and genes :math:`g`,

.. math::

    \mathrm{MSE} = \frac{1}{nG} \sum_{ig} (x_{ig} - y_{ig})^2, \qquad
    r_g = \frac{\sum_i (x_{ig} - \bar x_g)(y_{ig} - \bar y_g)}
               {\sqrt{\sum_i (x_{ig} - \bar x_g)^2 \sum_i (y_{ig} - \bar y_g)^2}}, \qquad
    \cos_i = \frac{x_i \cdot y_i}{\lVert x_i \rVert \lVert y_i \rVert}, \qquad
    v_g = \frac{\mathrm{Var}_i(x_{ig})}{\mathrm{Var}_i(y_{ig})}

and :math:`r_i` like :math:`r_g`, over the genes of a cell. Values are compared as they are: normalize the counts of truth
and prediction first (:func:`log1p_normalized`).

A correlation is NaN where the truth is constant, and is left out of means. It is 0 where only the prediction is constant, so
that a constant prediction is not left out. A gene that is NaN in every cell, on either side, is unmeasured: it has no score
and does not affect others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics.metrics._distances import row_chunks
from alphastomics.metrics._matrix import as_rows, dense_rows, measured_genes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

EXPRESSION_SCORES = ("expression_mse", "pearson_gene", "pearson_cell", "cosine_cell", "variance_ratio")


@dataclass(kw_only=True, slots=True)
class _Comparison:
    """Statistics for all scores, from one pass over the cells; arrays of genes contain the measured ones."""

    measured: NDArray[np.bool_]
    squared_error: float
    true_squares: Array  # sums of squared deviations from the mean of each gene
    predicted_squares: Array
    products: Array  # sums of products of both deviations
    pearson_cell: Array
    cosine_cell: Array

    def all_genes(self, values: Array) -> NDArray[np.float64]:
        """Values of all genes, (n_genes,); NaN for unmeasured genes."""
        result = np.full(len(self.measured), np.nan)
        result[self.measured] = values
        return result

    @property
    def pearson_gene(self) -> NDArray[np.float64]:
        return self.all_genes(_ratio(self.products, self.true_squares, self.predicted_squares))

    @property
    def variance_ratio(self) -> NDArray[np.float64]:
        varies = self.true_squares > 0
        ratio = np.full(len(varies), np.nan)
        return self.all_genes(np.divide(self.predicted_squares, self.true_squares, out=ratio, where=varies))

    @property
    def mse(self) -> float:
        n_values = len(self.pearson_cell) * int(self.measured.sum())
        return self.squared_error / n_values if n_values else float("nan")


def _ratio(products: Array, true_squares: Array, predicted_squares: Array) -> NDArray[np.float64]:
    """Products over the roots of both squares: NaN where the true squares are 0, 0 where only the predicted ones are."""
    result = np.where(true_squares > 0, 0.0, np.nan)
    both = (true_squares > 0) & (predicted_squares > 0)
    result[both] = products[both] / (np.sqrt(true_squares[both]) * np.sqrt(predicted_squares[both]))
    return result


def _deviations(block: Array, axis: int) -> NDArray[np.float64]:
    """Differences from the mean; exactly 0 where all values are equal."""
    constant = block.max(axis=axis, keepdims=True) == block.min(axis=axis, keepdims=True)
    return np.where(constant, 0.0, block - block.mean(axis=axis, keepdims=True))


def _correlate_cells(true: Array, predicted: Array) -> tuple[Array, Array]:
    """Pearson correlation and cosine of each cell of a block."""
    scores = []
    for y, x in ((_deviations(true, 1), _deviations(predicted, 1)), (true, predicted)):
        squares = (np.einsum("ij,ij->i", z, z) for z in (y, x))
        scores.append(_ratio(np.einsum("ij,ij->i", x, y), *squares))
    return scores[0], scores[1]


def _compare(true: Any, predicted: Any) -> _Comparison:
    """Compute all statistics in one pass; moments of blocks are merged as in Chan, Golub & LeVeque (1983)."""
    y_all, x_all = as_rows(true), as_rows(predicted)
    if y_all.shape != x_all.shape:
        raise ValueError(f"true and predicted expression differ in shape, {y_all.shape} and {x_all.shape}")
    measured = measured_genes(y_all) & measured_genes(x_all)
    n_cells, n_genes = y_all.shape[0], int(measured.sum())
    means, squares = np.zeros((2, n_genes)), np.zeros((3, n_genes))
    pearson_cell, cosine_cell = np.full(n_cells, np.nan), np.full(n_cells, np.nan)
    error = 0.0
    for rows in row_chunks(n_cells, y_all.shape[1]) if n_genes else ():
        y, x = dense_rows(y_all, rows)[:, measured], dense_rows(x_all, rows)[:, measured]
        error += float(np.square(x - y).sum())
        pearson_cell[rows], cosine_cell[rows] = _correlate_cells(y, x)
        _merge(means, squares, y, x, n_before=rows.start)
    return _Comparison(
        measured=measured,
        squared_error=error,
        true_squares=squares[0],
        predicted_squares=squares[1],
        products=squares[2],
        pearson_cell=pearson_cell,
        cosine_cell=cosine_cell,
    )


def _merge(means: Array, squares: Array, y: Array, x: Array, *, n_before: int) -> None:
    """Add a block of cells to the means and to the sums of squares and products, in place."""
    n = len(y)
    dy, dx = _deviations(y, 0), _deviations(x, 0)
    # The mean of a constant gene is its first value, which is not rounded.
    block_means = np.stack([np.where((d == 0).all(axis=0), z[0], z.mean(axis=0)) for d, z in ((dy, y), (dx, x))])
    delta = block_means - means
    share = n_before * n / (n_before + n)
    for row, (a, b) in enumerate(((0, 0), (1, 1), (0, 1))):
        u, v = (dy, dx)[a], (dy, dx)[b]
        squares[row] += np.einsum("ij,ij->j", u, v) + share * delta[a] * delta[b]
    means += delta * (n / (n_before + n))


def expression_mse(true: Any, predicted: Any) -> float:
    """Mean squared error over all cells and measured genes.

    Parameters
    ----------
    true
        True expression, (n_cells, n_genes), sparse or dense.
    predicted
        Predicted expression of the same cells and genes.

    Returns
    -------
    The error, in squared units of the values; NaN if there is no cell or no measured gene.

    Raises
    ------
    ValueError
        If the shapes differ, or a value of a measured gene is not finite.
    """
    return _compare(true, predicted).mse


def pearson_per_gene(true: Any, predicted: Any) -> NDArray[np.float64]:
    """Pearson correlation of each gene over the cells.

    Parameters
    ----------
    true
        True expression, (n_cells, n_genes), sparse or dense.
    predicted
        Predicted expression of the same cells and genes.

    Returns
    -------
    One value per gene, (n_genes,): NaN where the truth is constant or the gene unmeasured, 0 where only the prediction is
    constant.

    Raises
    ------
    ValueError
        If the shapes differ, or a value of a measured gene is not finite.
    """
    return _compare(true, predicted).pearson_gene


def pearson_per_cell(true: Any, predicted: Any) -> NDArray[np.float64]:
    """Pearson correlation of each cell over the measured genes.

    Parameters
    ----------
    true
        True expression, (n_cells, n_genes), sparse or dense.
    predicted
        Predicted expression of the same cells and genes.

    Returns
    -------
    One value per cell, (n_cells,): NaN where the truth is constant, 0 where only the prediction is.

    Raises
    ------
    ValueError
        If the shapes differ, or a value of a measured gene is not finite.
    """
    return _compare(true, predicted).pearson_cell


def cosine_per_cell(true: Any, predicted: Any) -> NDArray[np.float64]:
    """Cosine similarity of each cell over the measured genes.

    Parameters
    ----------
    true
        True expression, (n_cells, n_genes), sparse or dense.
    predicted
        Predicted expression of the same cells and genes.

    Returns
    -------
    One value per cell, (n_cells,): NaN where the truth is 0 in all genes, 0 where only the prediction is.

    Raises
    ------
    ValueError
        If the shapes differ, or a value of a measured gene is not finite.
    """
    return _compare(true, predicted).cosine_cell


def variance_ratio_per_gene(true: Any, predicted: Any) -> NDArray[np.float64]:
    """Variance of each gene over the predicted cells, divided by its variance over the true cells.

    The ratio is 1 for samples with the variance of data. It is below 1 for a mean over samples, although the mean correlates
    better with the truth than any sample.

    Parameters
    ----------
    true
        True expression, (n_cells, n_genes), sparse or dense.
    predicted
        Predicted expression of the same genes and cells.

    Returns
    -------
    One value per gene, (n_genes,); NaN where the truth is constant or the gene unmeasured.

    Raises
    ------
    ValueError
        If the shapes differ, or a value of a measured gene is not finite.
    """
    return _compare(true, predicted).variance_ratio


def expression_scores(true: Any, predicted: Any) -> dict[str, float]:
    """Score predicted expression of one slice.

    Parameters
    ----------
    true
        True expression, (n_cells, n_genes), sparse or dense; a gene that is NaN in every cell is unmeasured.
    predicted
        Predicted expression of the same cells and genes, on the same scale.

    Returns
    -------
    ``expression_mse``; ``pearson_gene``, ``pearson_cell`` and ``cosine_cell``, means over the genes or cells for which they
    are defined; ``variance_ratio``, the median over genes. A score is NaN if it is defined for no gene or cell.

    Raises
    ------
    ValueError
        If the shapes differ, or a value of a measured gene is not finite.
    """
    both = _compare(true, predicted)
    values = (
        both.mse,
        _defined(both.pearson_gene, np.mean),
        _defined(both.pearson_cell, np.mean),
        _defined(both.cosine_cell, np.mean),
        _defined(both.variance_ratio, np.median),
    )
    return dict(zip(EXPRESSION_SCORES, values, strict=True))


def _defined(values: Array, reduce: Any) -> float:
    """Reduce the values that are not NaN; NaN if there are none."""
    kept = values[~np.isnan(values)]
    return float(reduce(kept)) if len(kept) else float("nan")
