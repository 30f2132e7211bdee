"""Slices in ``.h5ad`` files, read a few cells at a time."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp
from anndata.io import read_elem, sparse_dataset

from alphastomics.data._checks import check_genes
from alphastomics.data._matrix import canonical

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
        self.obs: pd.DataFrame = read_elem(file["obs"])
        self.genes = check_genes(_index(file["var"]))
        self.position = _positions(file, path, options, len(self.obs))
        self._values = _expression(file, path, options)
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
            file = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(f"{path} cannot be read as .h5ad: {str(error).splitlines()[0]}") from error
        with file:
            if not {"obs", "var"} <= set(file):
                raise ValueError(f"{path} is no .h5ad file: it has no obs and var")
            yield cls(path, file, options)

    def slices(self, options: Stage1Options) -> list[RawSlice]:
        """The slices of the file by name; the file itself is one where nothing names them."""
        key = options.slice_key
        if key is None and DEFAULT_SLICE_KEY in self.obs:
            key = DEFAULT_SLICE_KEY
        animals = _column(self, options.animal_key, "animal_key")
        if key is None:
            names = np.full(len(self.obs), self.path.stem, dtype=object)
        else:
            column = _column(self, key, "slice_key")
            assert column is not None  # a key was given
            if column.isna().any():
                raise ValueError(f'{self.path}: obs["{key}"] is missing for {int(column.isna().sum())} cells')
            names = column.astype(str).to_numpy(dtype=object)
        found = []
        for name in np.unique(names):
            rows = np.flatnonzero(names == name)
            found.append(RawSlice(str(name), self.path, rows, _one_animal(animals, rows, str(name), self.path)))
        return found

    def labels(self, key: str | None, rows: NDArray[np.int64]) -> NDArray[np.object_] | None:
        """Labels of some cells, None where one is missing."""
        column = _column(self, key, "cell_type_key")
        if column is None:
            return None
        values = column.iloc[rows].astype(object)
        return np.array([None if pd.isna(value) else str(value) for value in values], dtype=object)

    def names(self, rows: NDArray[np.int64]) -> NDArray[np.object_]:
        """Names of some cells."""
        return self.obs.index.to_numpy()[rows].astype(str).astype(object)

    def expression(self, rows: NDArray[np.int64]) -> sp.csr_matrix:
        """Expression of ascending rows, canonical float64 CSR; a contiguous range is read in one piece."""
        low, high = int(rows[0]), int(rows[-1]) + 1
        block = self._values[low:high]
        block = block if high - low == len(rows) else block[rows - low]
        return canonical(block)


def _index(group: Any) -> list[str]:
    return [str(name) for name in read_elem(group).index]


def _column(tissue: RawTissue, key: str | None, argument: str) -> pd.Series | None:
    if key is None:
        return None
    if key not in tissue.obs:
        found = ", ".join(map(repr, tissue.obs.columns[:N_NAMES])) or "nothing"
        raise KeyError(f'{tissue.path}: obs["{key}"] is missing (found: {found}); pass {argument}=…')
    return tissue.obs[key]


def _one_animal(animals: pd.Series | None, rows: NDArray[np.int64], name: str, path: Path) -> str | None:
    if animals is None:
        return None
    found = animals.iloc[rows].astype(str).unique()
    if len(found) > 1:
        raise ValueError(f"{path}: slice {name!r} is of {len(found)} animals ({', '.join(found[:N_NAMES])})")
    return str(found[0])


def _positions(file: h5py.File, path: Path, options: Stage1Options, n_cells: int) -> NDArray[np.float64]:
    """Positions (n, 2 or 3). No other key is ever tried: an embedding is not a place."""
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
    position = position[:, :n_dims]
    bad = np.flatnonzero(~np.isfinite(position).all(axis=1))
    if len(bad):
        raise ValueError(f'{path}: obsm["{key}"] is not finite for {len(bad)} cells, the first in row {bad[0]}')
    return position


def _expression(file: h5py.File, path: Path, options: Stage1Options) -> Any:
    """The expression matrix, on disk: dense, or CSR; what is stored by columns is read and turned."""
    name = "X" if options.layer is None else f"layers/{options.layer}"
    if name not in file:
        raise KeyError(f"{path}: {name} is missing; pass layer=…")
    stored = file[name]
    if isinstance(stored, h5py.Dataset):
        return stored
    matrix = sparse_dataset(stored)
    return matrix if matrix.format == "csr" else sp.csr_matrix(matrix.to_memory())
