"""Cells of a dataset on disk: positions and library sizes in memory, expression read by row groups."""

from __future__ import annotations

import errno
import mmap
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
import scipy.sparse as sp

from alphastomics._io._errors import describe_error
from alphastomics.config import SourceConfig
from alphastomics.data._encode import NOT_THINNED, Encoder, dense_rows, thin_rows
from alphastomics.data._plane import leave_out_column
from alphastomics.data._slices import encode_labels
from alphastomics.data._sources import SliceCells
from alphastomics.data.parquet._columns import (
    EXPRESSION,
    INDICES,
    LABEL,
    POSITION,
    SIZE,
    SLICE,
    VALUES,
    read_expression,
    read_position,
)
from alphastomics.data.parquet._dataset import FOLDER, METADATA, DatasetInfo
from alphastomics.data.parquet._files import open_parquet
from alphastomics.data.parquet._mapped import SparseRows, map_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    import pandas as pd
    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

    from alphastomics.data.parquet._dataset import Shard

BUFFER_SIZE = SourceConfig.buffer_size  # cells among which contexts are shuffled
MAX_CACHED = 50_000  # largest number of cells in the cache of row groups that cannot be mapped
Values = Union[SparseRows, sp.csr_matrix, "NDArray[np.uint8]"]  # of a row group; dense rows as bytes


class Group(NamedTuple):
    """A row group: its file, its number there, the row of its first cell in the source, its number of cells and its slice."""

    file: int
    number: int
    start: int
    n_cells: int
    slice_index: int


class CellMetadata(NamedTuple):
    """Library sizes (N,) and positions (N, 3), in units of the input, of the cells of a file."""

    library_size: NDArray[np.float64]
    position: NDArray[np.float64]
    labels: pd.Series


class ParquetSource:
    """Cells of some splits of a dataset.

    Row groups that ``preprocess`` wrote are read from mapped files, row by row, after pyarrow has verified their checksums;
    others are decoded by pyarrow, and the most recently used are cached. Several threads can read a source. It can be pickled: other
    processes open its files again. ``buffer_size`` is the number of cells among which contexts are shuffled.

    Raises
    ------
    FileNotFoundError, ValueError
        If the dataset is missing or incomplete, or the splits have no cells.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        splits: Sequence[str] = ("train",),
        *,
        buffer_size: int = BUFFER_SIZE,
    ) -> None:
        self.folder = Path(folder)
        self.info = DatasetInfo.read(self.folder)
        self.schema = self.info.schema
        self.buffer_size = buffer_size
        self._shards = [shard for shard in self.info.shards if shard.split in splits]
        self._paths = [self.folder / FOLDER / shard.file for shard in self._shards]
        if not self._paths:
            raise ValueError(f"{folder} has no cells for {', '.join(splits)}")
        self.has_counts = self.info.counts
        self._index()
        self._reset()

    def _index(self) -> None:
        """Read everything but expression."""
        cells = [_read_cell_metadata(path, shard) for path, shard in zip(self._paths, self._shards, strict=True)]
        listed = [
            (file, number, name, n)
            for file, shard in enumerate(self._shards)
            for number, (name, n) in enumerate(shard.groups)
        ]
        names = sorted({name for *_, name, _ in listed})
        starts = np.concatenate([[0], np.cumsum([n for *_, n in listed])])
        self.groups = tuple(
            Group(file, number, int(start), n, names.index(name))
            for (file, number, name, n), start in zip(listed, starts, strict=False)
        )
        self._starts, self.n_cells = starts[:-1], int(starts[-1])
        if not self.n_cells:
            raise ValueError(f"{self.folder} has no cells in the splits that are read; make the dataset again")
        self._library_size: NDArray[np.float64] = np.concatenate([each.library_size for each in cells])
        self._cell_type = np.concatenate([encode_labels(each.labels, self.schema.cell_types) for each in cells])
        self._arrange(names, np.concatenate([each.position for each in cells])[:, : self.schema.n_columns])

    def _arrange(self, names: Sequence[str], position: NDArray[np.float64]) -> None:
        """Group row groups by slice."""
        by_slice: list[list[Group]] = [[] for _ in names]
        for group in self.groups:
            by_slice[group.slice_index].append(group)
        slices, self._pieces = [], []
        for name, groups in zip(names, by_slice, strict=True):
            rows = np.concatenate([np.arange(group.start, group.start + group.n_cells) for group in groups])
            slices.append(SliceCells(name, rows, leave_out_column(position[rows], self.schema, name)))
            self._pieces.append(np.split(np.arange(len(rows)), np.cumsum([group.n_cells for group in groups])[:-1]))
        self.slices: tuple[SliceCells, ...] = tuple(slices)
        genes = np.asarray(self.schema.genes, dtype=object)
        self._measured = np.stack([~np.isin(genes, self.info.unmeasured.get(name, ())) for name in names])
        encoders = {mask.tobytes(): Encoder(self.schema, mask) for mask in np.unique(self._measured, axis=0)}
        self._encoders = [encoders[mask.tobytes()] for mask in self._measured]
        self._factor = np.empty(self.n_cells, dtype=np.float32)
        for cells, encoder in zip(self.slices, self._encoders, strict=True):
            self._factor[cells.rows] = encoder.factor(self._library_size[cells.rows])
        self.measured: NDArray[np.bool_] = np.any(self._measured, axis=0)

    def _reset(self) -> None:
        self._files: dict[int, tuple[pq.ParquetFile, mmap.mmap]] = {}
        self._cache: OrderedDict[int, Values] = OrderedDict()
        self._mapped: dict[int, Values] = {}
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """The state without open files and row groups."""
        return {
            name: value for name, value in self.__dict__.items() if name not in ("_files", "_cache", "_mapped", "_lock")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._reset()

    def measured_in(self, slice_index: int) -> NDArray[np.bool_]:
        """Which genes of the schema the cells of a slice have, (G,)."""
        return self._measured[slice_index]

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """Numbers, within a slice, of the cells of each row group."""
        return self._pieces[slice_index]

    def sequence(self, rows: NDArray[np.int64]) -> None:
        """None, because datasets on disk have no order of cells."""

    def cell_type(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the cell types of some cells, (k,), 0 where unknown."""
        return self._cell_type[rows]

    def library_size(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum of the measured values of some cells, (k,)."""
        return self._library_size[rows]

    def expression(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Expression of some cells in network units, (k, G); see :meth:`AnnDataSource.expression`."""
        network, factor = self.values(rows)
        for group, start, end in self._runs(rows):
            self.encode(network[start:end], factor[start:end], self.groups[group].slice_index)
        return network

    def values(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Expression of some cells in user units, (k, G), and its factors; see :meth:`AnnDataSource.values`."""
        if thinning and not self.has_counts:
            raise ValueError(NOT_THINNED)
        found = np.empty((len(rows), self.schema.n_genes), dtype=np.float32)
        # Rows as bytes, because rows of a mapped file may not be aligned for float32.
        as_bytes = found.view(np.uint8)
        factor = self._factor.take(rows)
        for group, start, end in self._runs(rows):
            local, stored, out = rows[start:end] - self._starts[group], self._read(group), found[start:end]
            if isinstance(stored, np.ndarray):
                stored.take(local, axis=0, out=as_bytes[start:end], mode="clip")  # "raise" makes another copy
                if thinning:
                    thin_rows(out, thinning, rng)
            else:
                cells = stored.take(local, self.schema.n_genes) if isinstance(stored, SparseRows) else stored[local]
                out[:] = dense_rows(cells, self.schema.n_genes, thinning=thinning, rng=rng)
            if thinning:
                size = out.sum(axis=1, dtype=np.float64)
                factor[start:end] = self._encoders[self.groups[group].slice_index].factor(size)
        return found, factor

    def encode(self, values: NDArray[np.float32], factor: NDArray[np.float32], slice_index: int) -> NDArray[np.float32]:
        """Transform values of cells of a slice, as :meth:`values` returns them, to network units, in place."""
        return self._encoders[slice_index](values, factor)

    def _runs(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Row group, start and end of every run of rows in one row group."""
        number = self._starts.searchsorted(rows, side="right") - 1
        ends = [0, *((number[1:] != number[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
        for start, end in zip(ends, ends[1:], strict=False):
            if start < end:
                yield int(number[start]), start, end

    def _read(self, number: int) -> Values:
        """Values of a row group."""
        if number in self._mapped:
            return self._mapped[number]
        with self._lock:
            if number in self._cache:
                self._cache.move_to_end(number)
                return self._cache[number]
        found, is_mapped = self._load(self.groups[number])
        if is_mapped:  # the operating system frees this memory when needed
            self._mapped[number] = found
            return found
        with self._lock:
            self._cache[number] = found
            while len(self._cache) > 1 and sum(self.groups[i].n_cells for i in self._cache) > min(
                self.buffer_size, MAX_CACHED
            ):
                self._cache.popitem(last=False)
        return found

    def _load(self, group: Group) -> tuple[Values, bool]:
        """Values of a row group, after verification of their checksums, and whether they are in the mapped file."""
        path, n_genes = self._paths[group.file], self.schema.n_genes
        try:
            file, content = self._open(group.file)
            mapped = map_rows(content, file, group.number, n_genes)
            if mapped is not None:
                return mapped, True
            columns = [name for name in (EXPRESSION, INDICES, VALUES) if name in file.schema_arrow.names]
            found = read_expression(file.read_row_group(group.number, columns=columns, use_threads=False), n_genes)
            if found.shape[0] != group.n_cells:
                raise ValueError(f"it has {found.shape[0]} cells, not {group.n_cells}")
            if not isinstance(found, np.ndarray) and found.nnz:
                if not 0 <= found.indices.min() <= found.indices.max() < n_genes:
                    raise ValueError(f"{INDICES} must lie in 0 … {n_genes - 1}")
            return sp.csr_matrix(found), False
        except Exception as error:  # a damaged file can raise anything
            if isinstance(error, OSError) and error.errno == errno.EMFILE:
                raise OSError(
                    f"{path} cannot be opened ({describe_error(error)}); raise the limit with ulimit -n, or make the dataset "
                    "again with a larger --max-shard-size"
                ) from error
            raise ValueError(
                f"Row group {group.number} of {path} is damaged ({describe_error(error)}); make the dataset again"
            ) from error

    def _open(self, number: int) -> tuple[pq.ParquetFile, mmap.mmap]:
        with self._lock:
            if number not in self._files:
                path = self._paths[number]
                with path.open("rb") as file:
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._files[number] = open_parquet(path, content), content
            return self._files[number]


def _read_cell_metadata(path: Path, shard: Shard) -> CellMetadata:
    """Library sizes and positions of a file; raises ValueError unless it holds the cells that are listed."""
    with open_parquet(path) as file:
        try:
            rows = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            if rows != [n for _, n in shard.groups]:
                raise ValueError(f"its row groups are not those that {METADATA} lists")
            return _to_cell_metadata(file.read(columns=[SLICE, SIZE, POSITION, LABEL]), shard)
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(f"{path} is damaged ({describe_error(error)}); make the dataset again") from error


def _to_cell_metadata(table: pa.Table, shard: Shard) -> CellMetadata:
    if any(table.column(name).null_count for name in (SLICE, SIZE, POSITION)):
        raise ValueError("a value is missing")
    labels, start = table.column(SLICE), 0
    for name, n in shard.groups:
        if n and str(labels[start]) != name:
            raise ValueError(f"its row groups are not of the slices that {METADATA} lists")
        start += n
    cells = CellMetadata(
        table.column(SIZE).to_numpy().astype(np.float64),
        read_position(table),
        table.column(LABEL).dictionary_encode().to_pandas(),
    )
    if not (np.isfinite(cells.library_size).all() and np.isfinite(cells.position).all()):
        raise ValueError("a position or a library size is not a finite number")
    if len(cells.position) != len(table):
        raise ValueError("its columns differ in length")
    return cells
