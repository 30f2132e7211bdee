"""Reading expression matrices, sparse or dense, in blocks: the whole matrix is never dense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import numpy as np
import scipy.sparse as sp

from alphastomics.metrics._distances import row_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Matrix = Union["sp.csr_matrix", "sp.csr_array", "NDArray[Any]"]


def as_rows(values: Any) -> Matrix:
    """Give any sparse format as CSR and anything else as a plain array of two dimensions, or raise ``ValueError``."""
    matrix = values.tocsr() if sp.issparse(values) else np.asarray(values)
    if matrix.ndim != 2:
        raise ValueError(f"expression must be of shape (n_cells, n_genes), got {matrix.shape}")
    return matrix


def dense_rows(matrix: Matrix, rows: slice) -> NDArray[np.float64]:
    """Cells ``rows`` as a dense float64 copy."""
    block = matrix[rows]
    return np.array(block if isinstance(block, np.ndarray) else block.toarray(), dtype=np.float64)


def gene_blocks(matrix: Matrix) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Cut the genes into blocks and yield (genes, dense float64 copy of shape (n_cells, n_block))."""
    n_cells, n_genes = matrix.shape
    by_gene = matrix if isinstance(matrix, np.ndarray) else matrix.tocsc()
    for genes in row_chunks(n_genes, n_cells):
        block = by_gene[:, genes]
        yield genes, np.array(block if isinstance(block, np.ndarray) else block.toarray(), dtype=np.float64)


def measured_genes(matrix: Matrix, names: Sequence[str] | None = None) -> NDArray[np.bool_]:
    """Find the genes that were measured: NaN in every cell marks one that was not.

    Parameters
    ----------
    matrix
        Expression, (n_cells, n_genes).
    names
        Names of the genes, for the error; their numbers by default.

    Returns
    -------
    The mask, (n_genes,).

    Raises
    ------
    ValueError
        If a gene is NaN in some cells only, or infinite in any; the message names it.
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
