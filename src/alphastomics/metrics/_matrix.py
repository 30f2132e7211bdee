r"""Sparse or dense expression matrices: dense blocks, measured genes, and the scale on which expression is scored,

.. math:: y_{ig} = \log\Big(1 + L\, x_{ig} \Big/ \sum_h x_{ih}\Big),

with L the median library size of the truth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union, cast

import numpy as np
import scipy.sparse as sp

from alphastomics.metrics._distances import row_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Matrix = Union["sp.csr_matrix", "sp.csr_array", "NDArray[Any]"]


def as_rows(values: Any) -> Matrix:
    """Convert any sparse format to CSR without duplicates and anything else to an array; raises ``ValueError`` unless it has two dimensions."""
    matrix: Any = values.tocsr() if sp.issparse(values) else np.asarray(values)
    if sp.issparse(matrix) and not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
    if matrix.ndim != 2:
        raise ValueError(f"expression must be of shape (n_cells, n_genes), got {matrix.shape}")
    return cast("Matrix", matrix)


def dense_rows(matrix: Matrix, rows: slice) -> NDArray[np.float64]:
    """Dense float64 copy of the cells ``rows``."""
    block = matrix[rows]
    return np.array(block if isinstance(block, np.ndarray) else block.toarray(), dtype=np.float64)


def gene_blocks(matrix: Matrix) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Yield blocks of genes: their slice, and a dense float64 copy of shape (n_cells, n_block)."""
    n_cells, n_genes = matrix.shape
    by_gene = matrix if isinstance(matrix, np.ndarray) else matrix.tocsc()
    for genes in row_chunks(n_genes, n_cells):
        block = by_gene[:, genes]
        yield genes, np.array(block if isinstance(block, np.ndarray) else block.toarray(), dtype=np.float64)


def measured_genes(matrix: Matrix, names: Sequence[str] | None = None) -> NDArray[np.bool_]:
    """Mask (n_genes,) of the measured genes; an unmeasured gene is NaN in every cell.

    Raises ``ValueError``, with the name or number of the gene, if a gene is NaN in some cells only or infinite in any.
    """
    n_cells, n_genes = matrix.shape
    n_nan, n_infinite = np.zeros(n_genes, dtype=np.int64), np.zeros(n_genes, dtype=np.int64)
    if isinstance(matrix, np.ndarray):
        for rows in row_chunks(n_cells, n_genes):
            n_nan += np.isnan(matrix[rows]).sum(axis=0)
            n_infinite += np.isinf(matrix[rows]).sum(axis=0)
    else:
        n_nan = np.bincount(matrix.indices[np.isnan(matrix.data)], minlength=n_genes)
        n_infinite = np.bincount(matrix.indices[np.isinf(matrix.data)], minlength=n_genes)
    bad = np.flatnonzero((n_infinite > 0) | ((n_nan > 0) & (n_nan < n_cells)))
    if len(bad):
        first = bad[0]
        name = repr(str(names[first])) if names is not None else str(first)
        raise ValueError(
            f"expression of gene {name} is not finite in {n_nan[first] + n_infinite[first]} of {n_cells} cells; NaN in "
            "every cell marks a gene as unmeasured, any other value must be finite"
        )
    return n_nan == 0


def median_library_size(expression: Any) -> float:
    """Median over cells of the sum of their counts; empty cells are ignored.

    Parameters
    ----------
    expression
        Counts, (n_cells, n_genes), sparse or dense.

    Returns
    -------
    The median; NaN if every cell is empty. An unmeasured gene, NaN in every cell, does not count.
    """
    sizes = _library_sizes(as_rows(expression))
    filled = sizes[sizes > 0]
    return float(np.median(filled)) if len(filled) else float("nan")


def _library_sizes(matrix: Matrix) -> NDArray[np.float64]:
    """Sum (n_cells,) over the measured genes."""
    measured = measured_genes(matrix)
    return np.asarray((matrix if measured.all() else matrix[:, measured]).sum(axis=1, dtype=np.float64)).ravel()


def log1p_normalized(expression: Any, library_size: float) -> Any:
    r"""Scale every cell to one library size and take logarithms, :math:`\log(1 + x_{ig} L / \sum_h x_{ih})`.

    Expression is scored on this scale. Equals :func:`scanpy.pp.normalize_total` followed by :func:`scanpy.pp.log1p`.

    Parameters
    ----------
    expression
        Non-negative values, (n_cells, n_genes), sparse or dense. A gene that is NaN in every cell is not measured and remains so.
    library_size
        The library size :math:`L`: the median of the truth (:func:`median_library_size`), for truth and prediction.

    Returns
    -------
    A float64 copy, CSR if the input is sparse. Empty cells stay empty.

    Raises
    ------
    ValueError
        If a value is negative, or the library size is not finite.
    """
    if not np.isfinite(library_size):
        raise ValueError(f"library_size={library_size} must be finite; pass median_library_size of cells with counts")
    matrix = as_rows(expression)
    sizes = _library_sizes(matrix)
    factor = np.divide(library_size, sizes, out=np.zeros(len(sizes)), where=sizes > 0)
    values = matrix if isinstance(matrix, np.ndarray) else matrix.data
    if (values < 0).any():
        raise ValueError("expression has negative values; log1p_normalized needs counts or other values of at least 0")
    if isinstance(matrix, np.ndarray):
        return np.log1p(matrix * factor[:, None])
    result = matrix.astype(np.float64, copy=True)
    result.data = np.log1p(result.data * np.repeat(factor, np.diff(result.indptr)))
    return result
