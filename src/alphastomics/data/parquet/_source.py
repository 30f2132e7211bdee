"""Cells of a dataset on disk: places and library sizes in memory, expression read by row groups and kept for a while."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np
import scipy.sparse as sp

from alphastomics._io._errors import describe_error
from alphastomics.config import SourceConfig
from alphastomics.data._encode import Encoder, dense_rows, thin_rows
from alphastomics.data._sources import SliceCells
from alphastomics.data.parquet._columns import (
    EXPRESSION,
    INDICES,
    LENGTH,
    POSITION,
    SIZE,
    SLICE,
    VALUES,
    read_expression,
    read_position,
)
from alphastomics.data.parquet._dataset import FOLDER, METADATA, DatasetInfo
from alphastomics.data.parquet._files import open_parquet
from alphastomics.data.parquet._footer import RowGroup, check_room, read_footer
from alphastomics.data.parquet._pages import mapped_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

    from alphastomics.data._schema import TissueSchema

BUFFER = SourceConfig.buffer_size  # cells among which contexts are shuffled
KEPT = 50_000  # cells that are kept at most where files cannot be mapped
Values = Union["SparsePages", sp.csr_matrix, "NDArray[np.uint8]"]  # of a row group; dense ones as the bytes of its rows


class Group(NamedTuple):
    """A row group: its file, its number there, and the row of its first cell in the source."""

    file: int
    number: int
    start: int
    n_cells: int
    slice_index: int


class Places(NamedTuple):
    """All of a file but expression.

    Attributes
    ----------
    groups
        Slice and number of cells of every row group.
    library_size
        (N,).
    lengths
        How many values a cell has, (N,); None where the file does not say.
    position
        (N, 3), units of the input.
    """

    groups: tuple[tuple[str, int], ...]
    library_size: NDArray[np.float64]
    lengths: NDArray[np.int32] | None
    position: NDArray[np.float64]


class SparsePages(NamedTuple):
    """Sparse cells of a row group in a mapped file.

    Attributes
    ----------
    values, indices
        Bytes of the values, float32, and of the numbers of their genes, int32. They need not lie where numbers may.
    start
        Where each cell begins, in values; (n + 1,).
    """

    values: memoryview
    indices: memoryview
    start: NDArray[np.int64]

    def take(self, rows: NDArray[np.int64], n_genes: int) -> sp.csr_matrix:
        """Some cells; joining the bytes of theirs takes less time than scipy takes from a matrix."""
        first, last = self.start[rows], self.start[rows + 1]
        bytes_of = [slice(4 * a, 4 * b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        values = np.frombuffer(b"".join([self.values[each] for each in bytes_of]), np.float32)
        indices = np.frombuffer(b"".join([self.indices[each] for each in bytes_of]), np.int32)
        start = np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32)
        return sp.csr_matrix((values, indices, start), shape=(len(rows), n_genes), copy=False)


class ParquetSource:
    """Cells of some splits of a dataset.

    Expression is read from mapped files, row by row. Row groups that are stored in another way than ours are read whole and kept,
    the least recently used ones forgotten first. A source can be read by several threads, and sent to other processes, which
    open its files for themselves.

    Parameters
    ----------
    folder
        The dataset.
    splits
        ``"train"``, ``"validation"``, ``"test"``.
    buffer_size
        Number of cells among which contexts are shuffled.
    schema
        The tissue to read them for; that of the dataset when None.

    Raises
    ------
    FileNotFoundError, ValueError
        If the dataset is not there or not whole, or the splits have no cells.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        splits: Sequence[str] = ("train",),
        *,
        buffer_size: int = BUFFER,
        schema: TissueSchema | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.info = DatasetInfo.read(self.folder)
        self.schema = self.info.schema if schema is None else schema
        if self.schema.genes != self.info.schema.genes:
            raise ValueError(
                f"{folder} has other genes than the model; make the dataset with the gene list of the model"
            )
        self.buffer_size = buffer_size
        self._shards = [shard for shard in self.info.shards if shard.split in splits]
        self._paths = [self.folder / FOLDER / shard.file for shard in self._shards]
        if not self._paths:
            raise ValueError(f"{folder} has no cells for {', '.join(splits)}")
        self.has_counts = self.info.counts
        self._index()
        self._forget()

    def _index(self) -> None:
        """Read all but expression."""
        places, names = list[Places](), list[str]()
        groups: list[tuple[int, int, int]] = []
        for file, (path, shard) in enumerate(zip(self._paths, self._shards, strict=True)):
            found = _read_places(path)
            if found.groups != shard.groups:
                raise ValueError(f"{path} does not hold the cells that {METADATA} lists; make the dataset again")
            places.append(found)
            names += [name for name, _ in found.groups]
            groups += [(file, number, n) for number, (_, n) in enumerate(found.groups)]
        self._library_size: NDArray[np.float64] = np.concatenate([each.library_size for each in places])
        # How many values a cell has, where all files say so.
        lengths = [each.lengths for each in places if each.lengths is not None]
        self._lengths = np.concatenate(lengths) if len(lengths) == len(places) else None
        kinds = sorted(set(names))
        starts = np.concatenate([[0], np.cumsum([n for *_, n in groups])])
        self.groups = tuple(
            Group(file, number, int(start), n, kinds.index(name))
            for (file, number, n), start, name in zip(groups, starts, names, strict=False)
        )
        self._starts, self.n_cells = starts[:-1], int(starts[-1])
        if not self.n_cells:
            raise ValueError(f"{self.folder} has no cells in the splits that are read; make the dataset again")
        self._arrange(kinds, np.concatenate([each.position for each in places])[:, : self.schema.n_dims])

    def _arrange(self, names: Sequence[str], position: NDArray[np.float64]) -> None:
        """Bring row groups together by slices."""
        of_slice: list[list[Group]] = [[] for _ in names]
        for group in self.groups:
            of_slice[group.slice_index].append(group)
        slices, self._pieces = [], []
        for name, here in zip(names, of_slice, strict=True):
            rows = np.concatenate([np.arange(group.start, group.start + group.n_cells) for group in here])
            slices.append(SliceCells(name, rows, position[rows]))
            self._pieces.append(np.split(np.arange(len(rows)), np.cumsum([group.n_cells for group in here])[:-1]))
        self.slices: tuple[SliceCells, ...] = tuple(slices)
        genes = np.asarray(self.schema.genes, dtype=object)
        self._measured = np.stack([~np.isin(genes, self.info.unmeasured.get(name, ())) for name in names])
        encoders = {mask.tobytes(): Encoder(self.schema, mask) for mask in np.unique(self._measured, axis=0)}
        self._encoders = [encoders[mask.tobytes()] for mask in self._measured]
        self._factor = np.empty(self.n_cells, dtype=np.float32)
        for cells, encoder in zip(self.slices, self._encoders, strict=True):
            self._factor[cells.rows] = encoder.factor(self._library_size[cells.rows])
        self.measured: NDArray[np.bool_] = np.any(self._measured, axis=0)

    def _forget(self) -> None:
        self._files: dict[int, tuple[pq.ParquetFile, tuple[RowGroup, ...], mmap.mmap]] = {}
        self._kept: OrderedDict[int, Values] = OrderedDict()
        self._pages: dict[int, Values] = {}
        self._reading = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but open files and what was read."""
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_files", "_kept", "_pages", "_reading")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._forget()

    def measured_in(self, slice_index: int) -> NDArray[np.bool_]:
        """Which genes of the schema the cells of a slice have, (G,)."""
        return self._measured[slice_index]

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """Numbers, within a slice, of the cells that are read together."""
        return self._pieces[slice_index]

    def sequence(self, rows: NDArray[np.int64]) -> None:
        """There is no order: datasets on disk hold none."""

    def library_size(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum of the measured values of some cells, (k,)."""
        return self._library_size[rows]

    def expression(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> NDArray[np.float32]:
        """Expression of some cells in network units, (k, G); see :meth:`AnnDataSource.expression`."""
        network, factor = self.values(rows, thinning=thinning, rng=rng)
        for group, start, end in self._stretches(rows):
            self._encoders[self.groups[group].slice_index](network[start:end], factor[start:end])
        return network

    def values(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Expression of some cells in user units, (k, G), and by what to multiply it; see :meth:`AnnDataSource.values`."""
        if thinning and not self.has_counts:
            raise ValueError('Only integer counts under transform="log1p" can be thinned; set thinning=0.')
        found = np.empty((len(rows), self.schema.n_genes), dtype=np.float32)
        # Rows as bytes: those of a mapped file need not lie where numbers may.
        as_bytes = found.view(np.uint8)
        factor = self._factor.take(rows)
        for group, start, end in self._stretches(rows):
            here, kept, out = rows[start:end] - self._starts[group], self._read(group), found[start:end]
            if isinstance(kept, np.ndarray):
                kept.take(here, axis=0, out=as_bytes[start:end], mode="clip")  # "raise" copies once more
                if thinning:
                    thin_rows(out, thinning, rng)
            else:
                cells = kept.take(here, self.schema.n_genes) if isinstance(kept, SparsePages) else kept[here]
                out[:] = dense_rows(cells, self.schema.n_genes, thinning=thinning, rng=rng)
            if thinning:
                size = out.sum(axis=1, dtype=np.float64)
                factor[start:end] = self._encoders[self.groups[group].slice_index].factor(size)
        return found, factor

    def _stretches(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
        """Row group, begin and end of every stretch of rows of one row group."""
        number = self._starts.searchsorted(rows, side="right") - 1
        ends = [0, *((number[1:] != number[:-1]).nonzero()[0] + 1).tolist(), len(rows)]
        for start, end in zip(ends, ends[1:], strict=False):
            if start < end:
                yield int(number[start]), start, end

    def _read(self, number: int) -> Values:
        """Values of a row group."""
        if number in self._pages:
            return self._pages[number]
        with self._reading:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        found, in_file = self._load(self.groups[number])
        if in_file:  # the system takes its memory back by itself
            self._pages[number] = found
            return found
        with self._reading:
            self._kept[number] = found
            while len(self._kept) > 1 and sum(self.groups[i].n_cells for i in self._kept) > min(self.buffer_size, KEPT):
                self._kept.popitem(last=False)
        return found

    def _load(self, group: Group) -> tuple[Values, bool]:
        """Values of a row group, compared with what is known of them; and whether their memory is that of the mapped file."""
        path = self._paths[group.file]
        try:
            file, footer, content = self._open(group.file)
            found = self._mapped(footer[group.number], content, group)
            if found is not None:
                return found, True
            columns = [name for name in (EXPRESSION, INDICES, VALUES) if name in file.schema_arrow.names]
            read = read_expression(file.read_row_group(group.number, columns=columns), self.schema.n_genes)
            if read.shape[0] != group.n_cells:
                raise ValueError(f"it has {read.shape[0]} cells, not {group.n_cells}")
            if isinstance(read, sp.csr_matrix):
                self._check_genes(read.indices)
        except Exception as error:  # a damaged file can break the reader in any way
            raise ValueError(f"Row group {group.number} of {path} is damaged; make the dataset again") from error
        return read, False

    def _check_genes(self, indices: NDArray[np.int32]) -> None:
        if len(indices) and not 0 <= indices.min() <= indices.max() < self.schema.n_genes:
            raise ValueError("it names genes that there are not")

    def _open(self, number: int) -> tuple[pq.ParquetFile, tuple[RowGroup, ...], mmap.mmap]:
        with self._reading:
            if number not in self._files:
                path = self._paths[number]
                with path.open("rb") as file:
                    content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._files[number] = open_parquet(path), read_footer(path), content
            return self._files[number]

    def _mapped(self, footer: RowGroup, content: mmap.mmap, group: Group) -> SparsePages | NDArray[np.uint8] | None:
        """Values of a row group in the mapped file, if it is stored for that; its pages are compared with their checksums."""
        chunks, n_genes = footer.columns, self.schema.n_genes
        if EXPRESSION in chunks:
            values = mapped_values(content, chunks[EXPRESSION], group.n_cells * n_genes, np.float32)
            return None if values is None else values.reshape(group.n_cells, 4 * n_genes)
        if self._lengths is None:
            return None
        start = np.concatenate([[0], np.cumsum(self._lengths[group.start : group.start + group.n_cells])])
        n_values = int(start[-1])
        indices = mapped_values(content, chunks[INDICES], n_values, np.int32)
        values = mapped_values(content, chunks[VALUES], n_values, np.float32)
        if indices is None or values is None:
            return None
        self._check_genes(np.frombuffer(indices, np.int32))
        return SparsePages(values.data, indices.data, start)


def _read_places(path: Path) -> Places:
    """Slices, library sizes and positions of a file."""
    with open_parquet(path) as file:
        try:
            columns = [name for name in (SLICE, SIZE, POSITION, LENGTH) if name in file.schema_arrow.names]
            footer = read_footer(path)
            check_room(footer, range(len(footer)), columns)
            return _to_places(file.read(columns=columns), [group.n_rows for group in footer])
        except Exception as error:  # likewise
            raise ValueError(f"{path} is damaged ({describe_error(error)}); make the dataset again") from error


def _to_places(table: pa.Table, n_rows: list[int]) -> Places:
    if any(column.null_count for column in table.columns):
        raise ValueError("a value is missing")
    labels, starts = table.column(SLICE), np.cumsum([0, *n_rows])
    places = Places(
        tuple((str(labels[int(start)]), n) for start, n in zip(starts, n_rows, strict=False)),
        table.column(SIZE).to_numpy().astype(np.float64),
        table.column(LENGTH).to_numpy().astype(np.int32) if LENGTH in table.column_names else None,
        read_position(table),
    )
    if not (np.isfinite(places.library_size).all() and np.isfinite(places.position).all()):
        raise ValueError("a position or a library size is no number")
    if len(places.position) != len(table) or (places.lengths is not None and (places.lengths < 0).any()):
        raise ValueError("its columns do not fit each other")
    return places
