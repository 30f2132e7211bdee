"""Slices in ``.h5ad`` files, read a few cells at a time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import h5py
import numpy as np
import pandas as pd
from anndata.io import read_elem

from alphastomics._disk import reason
from alphastomics.data._checks import check_genes
from alphastomics.data._h5ad import check_contents
from alphastomics.data.preprocess._hdf5 import Table, open_expression

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import scipy.sparse as sp
    from numpy.typing import NDArray

    from alphastomics.data.preprocess._options import Stage1Options

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
    return f"{path} cannot be read as .h5ad ({reason(error)}); see that it is whole and readable, or remove it from the folder"


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
