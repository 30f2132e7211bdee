"""Slices in ``.h5ad`` files: names and positions in memory, expression read in chunks by h5py and anndata.

A matrix stored by rows (CSR, dense) is read in chunks of rows; one stored by columns (CSC) in chunks of columns, once
for each set of rows.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import read_elem, sparse_dataset

from alphastomics._io._errors import format_names
from alphastomics._keys import SLICE
from alphastomics._labels import label_name
from alphastomics.data._checks import check_genes
from alphastomics.data._h5ad import check_h5ad, reading_h5ad
from alphastomics.data._matrix import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from alphastomics.config import Stage1Options

CHUNK = 2**19  # stored values of a chunk
REMEDY = "remove it from the folder"


class Expression:
    """A matrix (N, G) in an HDF5 file: a dataset, or the group of a sparse matrix as anndata writes it."""

    def __init__(self, stored: h5py.Group | h5py.Dataset) -> None:
        self._stored = stored
        self._matrix = stored if isinstance(stored, h5py.Dataset) else sparse_dataset(stored)
        self.shape: tuple[int, ...] = self._matrix.shape
        self.by_columns = getattr(self._matrix, "format", None) == "csc"
        # First stored value of each row (column).
        self._starts: NDArray[np.int64] = (
            np.arange(self.shape[0] + 1) * self.shape[1]
            if isinstance(stored, h5py.Dataset)
            else stored["indptr"][:].astype(np.int64, copy=False)
        )
        if self._starts[0] != 0 or (np.diff(self._starts) < 0).any():
            raise ValueError(f"{stored.name}/indptr does not ascend from 0")

    @cached_property
    def n_values(self) -> NDArray[np.int64]:
        """Number of stored values of each row, zeros of a dense matrix included, (N,)."""
        if not self.by_columns:
            return np.diff(self._starts)
        counts, indices = np.zeros(self.shape[0], dtype=np.int64), self._stored["indices"]
        for start in range(0, len(indices), CHUNK):
            counts += np.bincount(indices[start : start + CHUNK], minlength=self.shape[0])
        return counts

    def read(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """Ascending rows in chunks: their numbers, and float32 CSR with sorted indices, without zeros."""
        if self.by_columns:
            columns = self._chunks(np.arange(self.shape[1]))
            blocks = [tidy(self._read(np.s_[:, low:high]).tocsr()[rows]) for _, low, high in columns]
            yield rows, sp.csr_matrix(sp.hstack(blocks, format="csr"))
            return
        for chunk, low, high in self._chunks(rows):
            block = self._read(np.s_[low:high])
            yield chunk, tidy(block if len(chunk) == high - low else block[chunk - low])

    def _chunks(self, numbers: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], int, int]]:
        """Ascending numbers of rows (columns), cut after ``CHUNK`` values of the file, and the range of each chunk."""
        ends = np.flatnonzero(np.diff(self._starts[numbers] // CHUNK)) + 1
        for chunk in np.split(numbers, ends):
            yield chunk, int(chunk[0]), int(chunk[-1]) + 1

    def _read(self, where: Any) -> Any:
        block = self._matrix[where]
        if sp.issparse(block):
            block.check_format(full_check=True)  # compiled code does not check indices
        return block


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


class RawSlice(NamedTuple):
    """A slice of an ``.h5ad`` file: its name, its ascending rows in the file, and its animal, if known."""

    name: str
    path: Path
    rows: NDArray[np.int64]
    animal: str | None


class RawTissue:
    """An open ``.h5ad`` file, read with the keys of the options."""

    def __init__(self, path: Path, file: h5py.File, options: Stage1Options) -> None:
        self.path, self._file = path, file
        names = {key: _index(file[key], path) for key in ("obs", "var")}
        self._names = names["obs"]
        try:
            self.genes = check_genes(names["var"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self.n_axes, self.position = _positions(file, path, options, len(self._names))
        self._columns: dict[str, pd.Series] = {}
        key = "X" if options.layer is None else f"layers/{options.layer}"
        if key not in file:
            raise KeyError(f"{path}: {key} is missing; pass layer=…")
        self._expression = Expression(file[key])
        if self._expression.shape != (len(self._names), len(self.genes)):
            raise ValueError(
                f"{path}: expression has shape {self._expression.shape}, but the file has {len(self._names)} cells and "
                f"{len(self.genes)} genes; write the file again"
            )

    @classmethod
    @contextmanager
    def open(cls, path: Path, options: Stage1Options) -> Iterator[RawTissue]:
        """Open a file; raises KeyError or ValueError, which name the file, if it lacks a key or is no ``.h5ad`` file."""
        with reading_h5ad(path, REMEDY):
            check_h5ad(path, lambda name: _is_in_memory(name, options))
            file = h5py.File(path, "r")
        with file:
            with reading_h5ad(path, REMEDY):
                if not {"obs", "var"} <= set(file):
                    raise ValueError(f"{path} is not an .h5ad file: obs or var is missing; {REMEDY}")
                tissue = cls(path, file, options)
            yield tissue

    @cached_property
    def columns(self) -> list[str]:
        """Names of the columns of ``obs``."""
        return [str(name) for name in self._file["obs"].attrs["column-order"]]

    def column(self, key: str, argument: str) -> pd.Series:
        """A column of ``obs``, cached; ``argument`` is the option that contains its name."""
        if key not in self._columns:
            if key not in self.columns:
                found = format_names(self.columns) or "nothing"
                raise KeyError(f'{self.path}: obs["{key}"] is missing (found: {found}); pass {argument}=…')
            obs = self._file["obs"]
            self._columns |= (
                {key: pd.Series(read_elem(obs[key]))} if _is_by_column(obs) else dict(read_elem(obs).items())
            )
        return self._columns[key]

    def slices(self, options: Stage1Options) -> list[RawSlice]:
        """Slices of the file, sorted by name; without a slice key, the file is one slice."""
        with reading_h5ad(self.path, REMEDY):
            return self._slices(options)

    def _slices(self, options: Stage1Options) -> list[RawSlice]:
        if not len(self._names):
            raise ValueError(f"{self.path} has no cells; {REMEDY}")
        key = options.slice_key
        if key is None and SLICE in self.columns:
            key = SLICE
        if options.cell_type_key is not None:
            self.column(options.cell_type_key, "cell_type_key")  # raises an error before files are written
        animals = None if options.animal_key is None else self.column(options.animal_key, "animal_key")
        if key is None:
            codes: NDArray[np.integer] = np.zeros(len(self._names), dtype=np.int8)
            names = [self.path.stem]
        else:
            codes, names = _codes(self.column(key, "slice_key"))
            if missing := int((codes < 0).sum()):
                raise ValueError(f'{self.path}: obs["{key}"] is missing for {missing} cells; fill it in')
        found = []
        for code in sorted(np.unique(codes), key=names.__getitem__):
            rows = np.flatnonzero(codes == code)
            animal = None if animals is None else self._animal(animals, rows, names[code], options)
            found.append(RawSlice(names[code], self.path, rows, animal))
        return found

    def _animal(self, animals: pd.Series, rows: NDArray[np.int64], name: str, options: Stage1Options) -> str:
        codes, names = _codes(animals.iloc[rows])
        if missing := int((codes < 0).sum()):
            raise ValueError(
                f'{self.path}: obs["{options.animal_key}"] is missing for {missing} cells of slice {name!r}; fill it in, or '
                "omit animal_key"
            )
        found = [names[code] for code in np.unique(codes)]
        if len(found) > 1:
            raise ValueError(
                f"{self.path}: slice {name!r} has cells of {len(found)} animals ({format_names(found)}); correct animal_key=… or slice_key=…"
            )
        return found[0]

    def labels(self, key: str | None, rows: NDArray[np.int64]) -> NDArray[np.object_]:
        """Labels of some cells, None where missing."""
        if key is None:
            return np.full(len(rows), None, dtype=object)
        with reading_h5ad(self.path, REMEDY):
            codes, names = _codes(self.column(key, "cell_type_key").iloc[rows])
        return np.array([*names, None], dtype=object)[codes]

    def names(self, rows: NDArray[np.int64]) -> NDArray[np.object_]:
        """Names of some cells."""
        return self._names[rows]

    def n_values(self, rows: NDArray[np.int64]) -> int:
        """Number of stored values of some cells, an upper bound of those that are not 0."""
        with reading_h5ad(self.path, REMEDY):
            return int(self._expression.n_values[rows].sum())

    def passes(self, rows: NDArray[np.int64], *, max_values: int, multiple: int) -> Iterator[NDArray[np.int64]]:
        """Cut rows after about ``max_values`` values into passes whose number of cells is a multiple of ``multiple``."""
        per_cell = max(1.0, self.n_values(rows) / len(rows))
        size = multiple * max(1, int(max_values / per_cell) // multiple)
        for start in range(0, len(rows), size):
            yield rows[start : start + size]

    def expression(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], sp.csr_matrix]]:
        """Ascending rows in chunks; see :meth:`Expression.read`."""
        with reading_h5ad(self.path, REMEDY):
            yield from self._expression.read(rows)


def _is_in_memory(name: str, options: Stage1Options) -> bool:
    """Whether a dataset is read at once; others are read in chunks."""
    return name.startswith(("/obs/", "/var/", f"/obsm/{options.position_key}")) or name.endswith("/indptr")


def _is_by_column(table: h5py.Group) -> bool:
    """Whether the columns of a table can be read one by one; tables of anndata 0.7 are read as a whole."""
    return (table.attrs.get("encoding-type"), table.attrs.get("encoding-version")) == ("dataframe", "0.2.0")


def _index(table: h5py.Group | h5py.Dataset, path: Path) -> NDArray[np.object_]:
    """Names of the rows of ``obs`` or ``var``."""
    if isinstance(table, h5py.Dataset):
        raise ValueError(
            f"{path}: {table.name[1:]} is of a format before anndata 0.7; read the file with anndata and write it again"
        )
    names = read_elem(table[table.attrs["_index"]]) if _is_by_column(table) else read_elem(table).index
    return np.array([str(name) for name in names], dtype=object)


def _codes(column: pd.Series) -> tuple[NDArray[np.integer], list[str]]:
    """Codes of the values, -1 where missing, and the values as text."""
    categories = pd.Categorical(column)
    return categories.codes, [label_name(value) for value in categories.categories]


def _positions(file: h5py.File, path: Path, options: Stage1Options, n_cells: int) -> tuple[int, NDArray[np.float64]]:
    """Number of stored coordinates, and positions (n, 2 or 3)."""
    key, found = options.position_key, list(file.get("obsm", {}))
    if key not in found:
        listed = ", ".join(map(repr, found)) or "nothing"
        raise KeyError(f'{path}: obsm["{key}"] is missing (found: {listed}); pass position_key=…')
    position = np.asarray(read_elem(file["obsm"][key]), dtype=np.float64)
    n_dims = 3 if options.position_is_3d else 2
    if position.ndim != 2 or position.shape[0] != n_cells or not n_dims <= position.shape[1] <= 3:
        raise ValueError(
            f'{path}: obsm["{key}"] has shape {position.shape}, but ({n_cells}, {n_dims}) is required; '
            "check position_key=… and position_is_3d=…"
        )
    n_axes, position = position.shape[1], position[:, :n_dims]
    bad = np.flatnonzero(~np.isfinite(position).all(axis=1))
    if len(bad):
        raise ValueError(
            f'{path}: obsm["{key}"] is not finite for {len(bad)} cells, the first in row {bad[0]}; remove these cells'
        )
    return n_axes, position
