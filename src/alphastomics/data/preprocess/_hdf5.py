"""Parts of ``.h5ad`` files, read when they are asked for: a column of a table, some rows of a matrix.

A matrix by rows (CSR, dense) is read in stretches of the file, one by columns (CSC) in stretches of columns, once for each
set of rows that is asked for. Neither is ever in memory as a whole.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import read_elem, sparse_dataset

from alphastomics.data._matrix import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

STRETCH = 2**19  # stored values of a file that are read at once
BY_COLUMN = ("dataframe", "0.2.0")  # the format whose columns can be read one by one


class Table:
    """``obs`` or ``var``, of which what was read is kept.

    Parameters
    ----------
    stored
        Where it is.

    Raises
    ------
    ValueError
        If it is of a format that anndata has not written since version 0.7.
    """

    def __init__(self, stored: h5py.Group | h5py.Dataset) -> None:
        if isinstance(stored, h5py.Dataset):
            raise ValueError(
                f"{stored.file.filename}: {stored.name[1:]} is of a format before anndata 0.7; read the file with anndata "
                "and write it again"
            )
        attributes = stored.attrs
        by_column = (attributes.get("encoding-type"), attributes.get("encoding-version")) == BY_COLUMN
        self._stored = stored
        self._columns: dict[str, pd.Series] = {}
        self._index: Any = stored[attributes["_index"]] if by_column else None
        if by_column:
            self.columns: list[str] = [str(name) for name in attributes["column-order"]]
        else:
            everything = read_elem(stored)
            self._columns = dict(everything.items())
            self.columns, self.index = list(self._columns), everything.index.astype(str).to_numpy(dtype=object)

    @cached_property
    def index(self) -> NDArray[np.object_]:
        """Names of the rows."""
        return np.array([str(name) for name in read_elem(self._index)], dtype=object)

    def __len__(self) -> int:
        if isinstance(self._index, h5py.Dataset):
            return int(self._index.shape[0])
        return len(self.index)

    def __contains__(self, key: str) -> bool:
        return key in self.columns

    def __getitem__(self, key: str) -> pd.Series:
        if key not in self._columns:
            self._columns[key] = pd.Series(read_elem(self._stored[key]))
        return self._columns[key]


class Expression(Protocol):
    """A matrix (N, G) on disk."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, G)."""

    def n_values(self, rows: NDArray[np.int64]) -> int:
        """How many values some rows have at most."""

    def read(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """Ascending rows in pieces: their numbers, and float32 CSR with sorted indices, without zeros."""


class DenseRows:
    """A dense matrix.

    Parameters
    ----------
    stored
        Where it is.
    """

    def __init__(self, stored: h5py.Dataset) -> None:
        self._stored = stored
        self.shape: tuple[int, ...] = stored.shape

    def n_values(self, rows: NDArray[np.int64]) -> int:
        """How many values some rows have, zeros included."""
        return len(rows) * self.shape[1]

    def read(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """Rows by stretches of the file."""
        for piece in cut(rows, rows * self.shape[1] // STRETCH):
            low, high = int(piece[0]), int(piece[-1]) + 1
            yield piece, tidy(self._stored[low:high][piece - low])


class SparseRows:
    """A matrix of which the values that are not 0 are stored row after row.

    Parameters
    ----------
    stored
        Where it is.
    shape
        (N, G).
    """

    def __init__(self, stored: h5py.Group, shape: tuple[int, int]) -> None:
        self._data, self._columns = stored["data"], stored["indices"]
        self._ends: NDArray[np.int64] = stored["indptr"][:].astype(np.int64, copy=False)
        self.shape = shape

    def n_values(self, rows: NDArray[np.int64]) -> int:
        """How many values are stored for some rows."""
        return int((self._ends[rows + 1] - self._ends[rows]).sum())

    def read(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """Rows by stretches of the file."""
        for piece in cut(rows, self._ends[rows] // STRETCH):
            low, high = int(piece[0]), int(piece[-1]) + 1
            start, end = int(self._ends[low]), int(self._ends[high])
            parts = (self._data[start:end], self._columns[start:end], self._ends[low : high + 1] - start)
            block = sp.csr_matrix(parts, shape=(high - low, self.shape[1]), copy=False)
            yield piece, tidy(block if len(piece) == high - low else block[piece - low])


class SparseColumns:
    """A matrix of which the values that are not 0 are stored column after column.

    Parameters
    ----------
    stored
        Where it is.
    shape
        (N, G).
    """

    def __init__(self, stored: h5py.Group, shape: tuple[int, int]) -> None:
        self._data, self._rows = stored["data"], stored["indices"]
        self._ends: NDArray[np.int64] = stored["indptr"][:].astype(np.int64, copy=False)
        self.shape = shape

    @cached_property
    def _lengths(self) -> NDArray[np.int64]:
        """Number of values of every row, for which all of them are looked at."""
        lengths = np.zeros(self.shape[0], dtype=np.int64)
        for start in range(0, self._rows.shape[0], STRETCH):
            lengths += np.bincount(self._rows[start : start + STRETCH], minlength=self.shape[0])
        return lengths

    def n_values(self, rows: NDArray[np.int64]) -> int:
        """How many values are stored for some rows."""
        return int(self._lengths[rows].sum())

    def read(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """All rows in one piece."""
        blocks = []
        for piece in cut(np.arange(self.shape[1]), self._ends[:-1] // STRETCH):
            low, high = int(piece[0]), int(piece[-1]) + 1
            start, end = int(self._ends[low]), int(self._ends[high])
            parts = (self._data[start:end], self._rows[start:end], self._ends[low : high + 1] - start)
            block = sp.csc_matrix(parts, shape=(self.shape[0], high - low), copy=False)
            blocks.append(tidy(block.tocsr()[rows]))
        yield rows, sp.csr_matrix(sp.hstack(blocks, format="csr"))


def cut(numbers: NDArray[np.int64], stretch: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Cut ascending numbers where another stretch begins."""
    return np.split(numbers, np.flatnonzero(np.diff(stretch)) + 1)


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
        return DenseRows(stored)
    matrix = sparse_dataset(stored)
    if matrix.format == "csr":
        return SparseRows(stored, matrix.shape)
    return SparseColumns(stored, matrix.shape)


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
