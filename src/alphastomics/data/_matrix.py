"""Expression matrices in blocks of rows, from any storage format.

Before any arithmetic, every block is brought to one canonical form: float64 CSR with sorted indices and without stored
zeros. Sums then run over the same numbers in the same order, so that CSR, CSC, dense, integer and float storage of one
matrix give the same bits, and memory holds no more than the non-zero values of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

import numpy as np
import scipy.sparse as sp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

Matrix = Union["sp.csr_matrix", "NDArray[Any]"]

_BLOCK_ROWS = 4096
_BLOCK_VALUES = 2**24


def as_matrix(values: Any) -> Matrix:
    """Convert any sparse format to CSR and anything else to a plain array, sharing memory where possible."""
    if not sp.issparse(values):
        return np.asarray(values)
    csr = values.tocsr()
    return sp.csr_matrix((csr.data, csr.indices, csr.indptr), shape=csr.shape, copy=False)


def canonical(matrix: Matrix) -> sp.csr_matrix:
    """Copy a matrix into float64 CSR with sorted indices, no duplicates and no stored zeros."""
    if sp.issparse(matrix):
        result = sp.csr_matrix(matrix, dtype=np.float64, copy=True)
    else:
        result = sp.csr_matrix(np.asarray(matrix, dtype=np.float64))
    result.sum_duplicates()
    result.eliminate_zeros()
    return result


def row_sums(block: sp.csr_matrix) -> NDArray[np.float64]:
    """Sum the rows of a canonical block in float64, in the order of the stored values."""
    return np.asarray(block @ np.ones(block.shape[1]), dtype=np.float64)


def column_sums(block: sp.csr_matrix) -> NDArray[np.float64]:
    """Sum the columns of a canonical block in float64, in the order of the stored values."""
    return np.asarray(block.T @ np.ones(block.shape[0]), dtype=np.float64)


def row_blocks(rows: NDArray[np.int64], n_genes: int) -> Iterator[NDArray[np.int64]]:
    """Cut row numbers into blocks whose dense float64 form is at most 128 MiB; the cuts depend on the shape alone."""
    size = max(1, min(_BLOCK_ROWS, _BLOCK_VALUES // max(1, n_genes)))
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def flat_blocks(matrix: Matrix) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the stored values piece by piece as (offset, 1-D values)."""
    if not isinstance(matrix, np.ndarray):
        for start in range(0, len(matrix.data), _BLOCK_VALUES):
            yield start, matrix.data[start : start + _BLOCK_VALUES]
        return
    for rows in row_blocks(np.arange(matrix.shape[0]), matrix.shape[1]):
        yield int(rows[0]) * matrix.shape[1], matrix[rows[0] : rows[-1] + 1].reshape(-1)


def flat_index(matrix: Matrix, position: int) -> tuple[int, int]:
    """Row and column of the value at offset ``position`` of :func:`flat_blocks`."""
    if not isinstance(matrix, np.ndarray):
        row = int(np.searchsorted(matrix.indptr, position, side="right")) - 1
        return row, int(matrix.indices[position])
    row, column = divmod(position, matrix.shape[1])
    return row, column


def align_columns(matrix: Matrix, columns: NDArray[np.int64]) -> Matrix:
    """Take columns in this order, without a copy if they are all columns in their order."""
    if matrix.shape[1] == len(columns) and np.array_equal(columns, np.arange(len(columns))):
        return matrix
    return matrix[:, columns]


class Moments:
    """Mean and variance per gene over blocks of cells, merged in float64.

    Blocks are merged as in Chan, Golub & LeVeque (1983): with n, m cells, δ the difference of the means and M₂ the
    sum of squared deviations, M₂ = M₂ₙ + M₂ₘ + δ² n m / (n + m). Cells that do not measure a gene do not count for it.
    """

    def __init__(self, n_genes: int) -> None:
        self.n_cells = np.zeros(n_genes, dtype=np.int64)
        self.mean = np.zeros(n_genes)
        self.squares = np.zeros(n_genes)

    def add(self, block: sp.csr_matrix, measured: NDArray[np.bool_] | None = None) -> None:
        """Add the cells of a canonical block, for the genes that are ``measured`` (G,)."""
        n_cells, n_genes = block.shape
        part = Moments(n_genes)
        part.n_cells += n_cells if measured is None else n_cells * measured
        part.mean = column_sums(block) / n_cells
        squared = (block.data - part.mean[block.indices]) ** 2
        squared = sp.csr_matrix((squared, block.indices, block.indptr), shape=block.shape, copy=False)
        n_zeros = n_cells - np.bincount(block.indices, minlength=n_genes)
        part.squares = column_sums(squared) + n_zeros * part.mean**2
        self.merge(part)

    def merge(self, part: Moments) -> None:
        """Add the cells of other moments."""
        delta = part.mean - self.mean
        total = self.n_cells + part.n_cells
        share = np.divide(part.n_cells, total, out=np.zeros(len(total)), where=total > 0)
        self.mean += delta * share
        self.squares += np.where(part.n_cells > 0, part.squares + delta**2 * (self.n_cells * share), 0.0)
        self.n_cells = total

    @property
    def sd(self) -> NDArray[np.float64]:
        """Population standard deviation."""
        return np.sqrt(self.squares / np.maximum(self.n_cells, 1))
