"""Parts of ``.h5ad`` files, read when they are asked for: a column of a table, some rows of a matrix.

A matrix by rows (CSR, dense) is read in stretches of the file, one by columns (CSC) in stretches of columns, once for each
set of rows that is asked for. Neither is ever in memory as a whole.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np
import scipy.sparse as sp
from anndata.io import read_elem, sparse_dataset

from alphastomics.data._matrix import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pandas as pd
    from numpy.typing import NDArray

STRETCH = 2**21  # stored values of a file that are read at once
BY_COLUMN = ("dataframe", "0.2.0")  # the format whose columns can be read one by one


class Table:
    """``obs`` or ``var``.

    Parameters
    ----------
    stored
        Where it is.
    """

    def __init__(self, stored: h5py.Group | h5py.Dataset) -> None:
        attributes = stored.attrs
        by_column = (attributes.get("encoding-type"), attributes.get("encoding-version")) == BY_COLUMN
        self._stored = stored if by_column else None
        self._all: pd.DataFrame | None = None if by_column else read_elem(stored)
        self.columns: list[str] = [str(name) for name in (attributes["column-order"] if by_column else self._all)]

    @cached_property
    def index(self) -> NDArray[np.object_]:
        """Names of the rows."""
        names = self._all.index if self._stored is None else read_elem(self._stored[self._stored.attrs["_index"]])
        return np.array([str(name) for name in names], dtype=object)

    def __contains__(self, key: str) -> bool:
        return key in self.columns

    def __getitem__(self, key: str) -> pd.Series:
        import pandas as pd

        return self._all[key] if self._stored is None else pd.Series(read_elem(self._stored[key]))


class Expression(Protocol):
    """A matrix (N, G) on disk."""

    shape: tuple[int, int]

    def n_values(self, rows: NDArray[np.int64]) -> float:
        """About how many values some rows have."""

    def read(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """Ascending rows in pieces: their numbers, and float32 CSR with sorted indices, without zeros."""


class ByRows:
    """A matrix that is stored row after row.

    Parameters
    ----------
    stored
        What gives rows.
    ends
        Number of values before each row, and of all (N + 1,).
    """

    def __init__(self, stored: Any, ends: NDArray[np.int64]) -> None:
        self._stored, self._ends = stored, ends
        self.shape: tuple[int, int] = tuple(stored.shape)

    def n_values(self, rows: NDArray[np.int64]) -> float:
        """How many values are stored for some rows."""
        return float((self._ends[rows + 1] - self._ends[rows]).sum())

    def read(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """Rows by stretches of the file."""
        stretch = self._ends[rows] // STRETCH
        for piece in np.split(rows, np.flatnonzero(np.diff(stretch)) + 1):
            low, high = int(piece[0]), int(piece[-1]) + 1
            block = self._stored[low:high]
            yield piece, tidy(block if high - low == len(piece) else block[piece - low])


class ByColumns:
    """A sparse matrix that is stored column after column.

    Parameters
    ----------
    stored
        What gives columns.
    ends
        Number of values before each column, and of all (G + 1,).
    """

    def __init__(self, stored: Any, ends: NDArray[np.int64]) -> None:
        self._stored, self._ends = stored, ends
        self.shape: tuple[int, int] = tuple(stored.shape)

    def n_values(self, rows: NDArray[np.int64]) -> float:
        """How many values so many rows have on average."""
        return len(rows) * float(self._ends[-1]) / self.shape[0]

    def read(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """All rows in one piece."""
        columns = np.arange(self.shape[1])
        stretches = np.split(columns, np.flatnonzero(np.diff(self._ends[:-1] // STRETCH)) + 1)
        blocks = [tidy(self._stored[:, int(each[0]) : int(each[-1]) + 1].tocsr()[rows]) for each in stretches]
        yield rows, sp.csr_matrix(sp.hstack(blocks, format="csr"))


def open_expression(file: h5py.File, path: Path, layer: str | None) -> Expression:
    """The expression matrix of a file.

    Raises
    ------
    KeyError
        If it is not there.
    """
    name = "X" if layer is None else f"layers/{layer}"
    if name not in file:
        raise KeyError(f"{path}: {name} is missing; pass layer=…")
    stored = file[name]
    if isinstance(stored, h5py.Dataset):
        return ByRows(stored, np.arange(stored.shape[0] + 1, dtype=np.int64) * int(np.prod(stored.shape[1:])))
    matrix, ends = sparse_dataset(stored), np.asarray(stored["indptr"], dtype=np.int64)
    return ByRows(matrix, ends) if matrix.format == "csr" else ByColumns(matrix, ends)


def tidy(block: Any) -> sp.csr_matrix:
    """Rows as float32 CSR with sorted indices, without duplicates and zeros."""
    if not sp.issparse(block):
        values = np.asarray(block, dtype=np.float32)
        row, column = np.nonzero(values)
        ends = np.searchsorted(row, np.arange(len(values) + 1))
        return sp.csr_matrix((values[row, column], column.astype(np.int32), ends), shape=values.shape, copy=False)
    if not block.has_canonical_format:
        block = canonical(block)
    data, columns = block.data.astype(np.float32, copy=False), block.indices.astype(np.int32, copy=False)
    result = sp.csr_matrix((data, columns, block.indptr), shape=block.shape, copy=False)
    if not data.all():
        result.eliminate_zeros()
    return result
