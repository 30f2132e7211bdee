"""The scale on which expression is scored: logarithms at one library size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics.metrics._matrix import Matrix, as_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray


def median_library_size(expression: Any) -> float:
    """Median over cells of the sum of their genes; empty cells do not count.

    Parameters
    ----------
    expression
        Counts of the measured genes, (n_cells, n_genes), sparse or dense.

    Returns
    -------
    The median, NaN where every cell is empty.
    """
    sizes = _library_sizes(as_rows(expression))
    filled = sizes[sizes > 0]
    return float(np.median(filled)) if len(filled) else float("nan")


def _library_sizes(matrix: Matrix) -> NDArray[np.float64]:
    return np.asarray(matrix.sum(axis=1, dtype=np.float64)).ravel()


def log1p_normalized(expression: Any, library_size: float) -> Any:
    r"""Bring every cell to one library size and take logarithms, :math:`\log(1 + x_{ig} L / \sum_h x_{ih})`.

    The scale on which expression is scored. Equals :func:`scanpy.pp.normalize_total` followed by
    :func:`scanpy.pp.log1p`.

    Parameters
    ----------
    expression
        Values that are not negative, of the measured genes, (n_cells, n_genes), sparse or dense.
    library_size
        The library size :math:`L`; of prediction and truth alike, the median of the truth
        (:func:`median_library_size`).

    Returns
    -------
    A copy, CSR where the input is sparse, float64. Empty cells stay empty.

    Raises
    ------
    ValueError
        If a value is negative.
    """
    matrix = as_rows(expression)
    sizes = _library_sizes(matrix)
    factor = np.divide(library_size, sizes, out=np.zeros(len(sizes)), where=sizes > 0)
    values = matrix if isinstance(matrix, np.ndarray) else matrix.data
    if values.size and values.min() < 0:
        raise ValueError("expression has negative values, of which log1p has no use; score them as they are")
    if isinstance(matrix, np.ndarray):
        return np.log1p(matrix * factor[:, None])
    result = matrix.astype(np.float64, copy=True)
    result.data = np.log1p(result.data * np.repeat(factor, np.diff(result.indptr)))
    return result
