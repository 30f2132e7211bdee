"""Parts of ``.h5ad`` files, read when they are asked for: a column of a table, some rows of a matrix.

A matrix by rows (CSR, dense) is read in stretches of the file, one by columns (CSC) in stretches of columns, once for each
set of rows that is asked for. Neither is ever in memory as a whole.

Slices in ``.h5ad`` files, read a few cells at a time.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import read_elem, sparse_dataset

from alphastomics._io._errors import describe_error
from alphastomics.data._checks import check_genes
from alphastomics.data._h5ad import check_contents
from alphastomics.data._matrix import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from alphastomics.data.preprocess._options import Stage1Options

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


N_NAMES = 5
DEFAULT_SLICE_KEY = "slice_id"


class RawSlice(NamedTuple):
    """A slice and where it is.

    Attributes
    ----------
    name
        Its name.
    path
        The file.
    rows
        Its rows there, ascending.
    animal
        The animal that it is of; None where nobody says.
    """

    name: str
    path: Path
    rows: NDArray[np.int64]
    animal: str | None


class RawTissue:
    """An open ``.h5ad`` file, of which only names and positions are in memory.

    Parameters
    ----------
    path
        The file.
    file
        The same, open.
    options
        Where things are.
    """

    def __init__(self, path: Path, file: h5py.File, options: Stage1Options) -> None:
        self.path = path
        self.obs = Table(file["obs"])
        self.genes = _genes(path, Table(file["var"]).index)
        self.n_axes, self.position = _positions(file, path, options, len(self.obs))
        self._values = open_expression(file, path, options.layer)
        if self._values.shape != (len(self.obs), len(self.genes)):
            raise ValueError(
                f"{path}: expression is of shape {self._values.shape}, with {len(self.obs)} cells and "
                f"{len(self.genes)} genes; write the file again"
            )

    @classmethod
    @contextmanager
    def open(cls, path: Path, options: Stage1Options) -> Iterator[RawTissue]:
        """Open a file.

        Raises
        ------
        KeyError, ValueError
            If it is no ``.h5ad`` file, or lacks what the options name.
        """
        try:
            check_contents(path, lambda name: _is_held(name, options))
            file = h5py.File(path, "r")
        except Exception as error:  # a damaged file can break the reader in any way
            raise ValueError(_unreadable(path, error)) from error
        with file:
            with _whole(path):
                if not {"obs", "var"} <= set(file):
                    raise ValueError(f"{path} is no .h5ad file: it has no obs and var; remove it from the folder")
                tissue = cls(path, file, options)
            yield tissue

    def slices(self, options: Stage1Options) -> list[RawSlice]:
        """The slices of the file by name; the file itself is one where nothing names them."""
        with _whole(self.path):
            return self._slices(options)

    def _slices(self, options: Stage1Options) -> list[RawSlice]:
        if not len(self.obs):
            raise ValueError(f"{self.path} has no cells; remove it from the folder")
        key = options.slice_key
        if key is None and DEFAULT_SLICE_KEY in self.obs:
            key = DEFAULT_SLICE_KEY
        if options.cell_type_key is not None:
            _column(self, options.cell_type_key, "cell_type_key")  # known to be missing before anything is written
        animals = None if options.animal_key is None else _column(self, options.animal_key, "animal_key")
        if key is None:
            codes: NDArray[np.integer] = np.zeros(len(self.obs), dtype=np.int8)
            kinds = [self.path.stem]
        else:
            codes, kinds = _codes(_column(self, key, "slice_key"))
            if (codes < 0).any():
                raise ValueError(f'{self.path}: obs["{key}"] is missing for {int((codes < 0).sum())} cells; fill it in')
        found = []
        for code in sorted(np.unique(codes), key=kinds.__getitem__):
            rows = np.flatnonzero(codes == code)
            animal = None if animals is None else self._animal(animals, rows, kinds[code], options)
            found.append(RawSlice(kinds[code], self.path, rows, animal))
        return found

    def _animal(self, animals: pd.Series, rows: NDArray[np.int64], name: str, options: Stage1Options) -> str:
        codes, kinds = _codes(animals.iloc[rows])
        if missing := int((codes < 0).sum()):
            raise ValueError(
                f'{self.path}: obs["{options.animal_key}"] is missing for {missing} cells of slice {name!r}; fill it in, or '
                "leave out the key of animals"
            )
        found = [kinds[code] for code in np.unique(codes)]
        if len(found) > 1:
            raise ValueError(f"{self.path}: slice {name!r} is of {len(found)} animals ({', '.join(found[:N_NAMES])})")
        return found[0]

    def labels(self, key: str | None, rows: NDArray[np.int64]) -> NDArray[np.object_]:
        """Labels of some cells, None where one is missing."""
        if key is None:
            return np.full(len(rows), None, dtype=object)
        with _whole(self.path):
            codes, kinds = _codes(_column(self, key, "cell_type_key").iloc[rows])
        return np.array([*kinds, None], dtype=object)[codes]

    def names(self, rows: NDArray[np.int64]) -> NDArray[np.object_]:
        """Names of some cells."""
        with _whole(self.path):
            return self.obs.index[rows]

    def n_values(self, rows: NDArray[np.int64]) -> int:
        """How many values some cells have at most."""
        return self._values.n_values(rows)

    def passes(self, rows: NDArray[np.int64], *, at_once: int, multiple: int) -> Iterator[NDArray[np.int64]]:
        """Cut rows where about ``at_once`` values have come together, after a multiple of so many cells."""
        per_cell = max(1.0, self.n_values(rows) / len(rows))
        size = multiple * max(1, int(at_once / per_cell) // multiple)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def expression(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """Ascending rows in pieces: their numbers, and float32 CSR with sorted indices, without zeros."""
        with _whole(self.path):
            for numbers, block in self._values.read(rows):
                if block.nnz and not 0 <= block.indices.min() <= block.indices.max() < len(self.genes):
                    raise ValueError("a value is of a gene that there is not")
                yield numbers, block


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Name the file in what is raised when it is not what it says that it is."""
    try:
        yield
    except Exception as error:  # likewise
        if isinstance(error, (KeyError, ValueError)) and str(path) in str(error):
            raise
        raise ValueError(_unreadable(path, error)) from error


def _is_held(name: str, options: Stage1Options) -> bool:
    """Whether a dataset is read as a whole; others are read a few cells at a time."""
    return name.startswith(("/obs/", "/var/", f"/obsm/{options.position_key}")) or name.endswith("/indptr")


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path} cannot be read as .h5ad ({describe_error(error)}); see that it is whole and readable, or remove it from the folder"


def _genes(path: Path, names: NDArray[np.object_]) -> tuple[str, ...]:
    try:
        return check_genes(names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _column(tissue: RawTissue, key: str, argument: str) -> pd.Series:
    if key not in tissue.obs:
        found = ", ".join(map(repr, tissue.obs.columns[:N_NAMES])) or "nothing"
        raise KeyError(f'{tissue.path}: obs["{key}"] is missing (found: {found}); pass {argument}=…')
    return tissue.obs[key]


def _codes(column: pd.Series) -> tuple[NDArray[np.integer], list[str]]:
    """Numbers of the values, -1 where one is missing, and the values as text."""
    categories = pd.Categorical(column)
    return categories.codes, [_text(value) for value in categories.categories]


def _text(value: object) -> str:
    """A value as text; 1.0, which is how 1 is stored in a column with missing values, is 1."""
    return str(int(value)) if isinstance(value, (float, np.floating)) and value.is_integer() else str(value)


def _positions(file: h5py.File, path: Path, options: Stage1Options, n_cells: int) -> tuple[int, NDArray[np.float64]]:
    """How many coordinates there are, and positions (n, 2 or 3). No other key is ever tried: an embedding is not a place."""
    key, found = options.position_key, list(file.get("obsm", {}))
    if key not in found:
        listed = ", ".join(map(repr, found)) or "nothing"
        raise KeyError(f'{path}: obsm["{key}"] is missing (found: {listed}); pass position_key=…')
    position = np.asarray(read_elem(file["obsm"][key]), dtype=np.float64)
    n_dims = 3 if options.position_is_3d else 2
    if position.ndim != 2 or position.shape[0] != n_cells or position.shape[1] < n_dims:
        raise ValueError(
            f'{path}: obsm["{key}"] is of shape {position.shape}, where ({n_cells}, {n_dims}) is needed; '
            "check position_key and position_is_3d"
        )
    n_axes, position = position.shape[1], position[:, :n_dims]
    bad = np.flatnonzero(~np.isfinite(position).all(axis=1))
    if len(bad):
        raise ValueError(
            f'{path}: obsm["{key}"] is not finite for {len(bad)} cells, the first in row {bad[0]}; remove these cells'
        )
    return n_axes, position
