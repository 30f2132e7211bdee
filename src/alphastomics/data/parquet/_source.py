"""Cells of a dataset on disk: names, places and library sizes in memory, expression read by row groups and kept for a while."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from alphastomics.data._source import SliceCells
from alphastomics.data.parquet._columns import (
    EXPRESSION,
    INDICES,
    POSITION,
    SIZE,
    SLICE,
    VALUES,
    read_expression,
    read_position,
)
from alphastomics.data.parquet._dataset import FOLDER, DatasetInfo
from alphastomics.data.parquet._files import open_parquet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

    from alphastomics.data._schema import TissueSchema

BUFFER = 50_000  # cells whose expression is kept
DENSE_BYTES = 2**29  # what a buffer may take whose rows are ready to be copied; a larger one is kept sparse


class Group(NamedTuple):
    """A row group: its file, its number there, and the row of its first cell in the source."""

    file: int
    number: int
    start: int
    n_cells: int
    slice_index: int


class Kept(NamedTuple):
    """Expression of a row group: user units, what it adds to the network units of zeros, these, and all in network units.

    Of the second and the last one is there: rows of the last are copied faster, the second takes less memory.
    """

    values: sp.csr_matrix
    deviations: sp.csr_matrix | None
    zeros: NDArray[np.float32]
    network: NDArray[np.float32] | None


class ParquetSource:
    """Cells of some splits of a dataset.

    Expression is read by row groups, which are kept, the least recently used ones forgotten first. A source can be sent to
    other processes, which open its files for themselves.

    Parameters
    ----------
    folder
        The dataset.
    splits
        ``"train"``, ``"validation"``, ``"test"``.
    buffer_size
        Number of cells whose expression is kept.
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
        self._paths = [self.folder / FOLDER / shard.file for shard in self.info.shards if shard.split in splits]
        if not self._paths:
            raise ValueError(f"{folder} has no cells for {', '.join(splits)}")
        self.has_counts = self.info.counts
        self._index()
        self._forget()

    def _index(self) -> None:
        """Read all but expression."""
        positions, sizes, names = [], [], list[str]()
        groups: list[tuple[int, int, int]] = []
        for file, path in enumerate(self._paths):
            with open_parquet(path) as parquet:
                try:
                    table = parquet.read(columns=[SLICE, SIZE, POSITION])
                except (OSError, ValueError) as error:
                    raise ValueError(f"{path} is damaged; make the dataset again") from error
                lengths = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
            start = 0
            labels = table.column(SLICE)
            for number, n in enumerate(lengths):
                names.append(labels[start].as_py())
                groups.append((file, number, n))
                start += n
            positions.append(read_position(table)[:, : self.schema.n_dims])
            sizes.append(table.column(SIZE).to_numpy())
        self._library_size: NDArray[np.float64] = np.concatenate(sizes)
        position = np.concatenate(positions)
        kinds = sorted(set(names))
        starts = np.concatenate([[0], np.cumsum([n for *_, n in groups])])
        self.groups = tuple(
            Group(file, number, int(start), n, kinds.index(name))
            for (file, number, n), start, name in zip(groups, starts, names, strict=False)
        )
        self._starts = starts[:-1]
        self.n_cells = int(starts[-1])
        of_slice: list[list[Group]] = [[] for _ in kinds]
        for group in self.groups:
            of_slice[group.slice_index].append(group)
        slices, self._pieces = [], []
        for name, here in zip(kinds, of_slice, strict=True):
            rows = np.concatenate([np.arange(group.start, group.start + group.n_cells) for group in here])
            slices.append(SliceCells(name, rows, position[rows]))
            self._pieces.append(np.split(np.arange(len(rows)), np.cumsum([group.n_cells for group in here])[:-1]))
        self.slices: tuple[SliceCells, ...] = tuple(slices)
        genes = np.asarray(self.schema.genes, dtype=object)
        self._measured = np.stack([~np.isin(genes, self.info.unmeasured.get(name, ())) for name in kinds])
        self.measured: NDArray[np.bool_] = np.any(self._measured, axis=0)

    def _forget(self) -> None:
        self._files: dict[int, pq.ParquetFile] = {}
        self._kept: OrderedDict[int, Kept] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but open files and what was read."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_files", "_kept")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._forget()

    def measured_in(self, slice_index: int) -> NDArray[np.bool_]:
        """Which genes of the schema the cells of a slice have, (G,)."""
        return self._measured[slice_index]

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """Numbers, within a slice, of the cells that are read together."""
        return self._pieces[slice_index]

    def library_size(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum of the measured values of some cells, (k,)."""
        return self._library_size[rows]

    def expression(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> NDArray[np.float32]:
        """Expression of some cells in network units, (k, G); see :meth:`AnnDataSource.expression`.

        All of them are of one slice, or of slices that measure the same genes.
        """
        network = np.empty((len(rows), self.schema.n_genes), dtype=np.float32)
        number = np.searchsorted(self._starts, rows, side="right") - 1
        ends = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(rows)]
        for start, end in zip(ends, ends[1:], strict=False):  # stretches of one row group
            group = int(number[start])
            here, kept = rows[start:end] - self._starts[group], self._read(group)
            measured = self._measured[self.groups[group].slice_index]
            if kept.network is not None and not thinning:
                np.take(kept.network, here, axis=0, out=network[start:end], mode="clip")  # "raise" copies once more
                continue
            if thinning:
                deviation = self._thinned(kept.values[here], measured, thinning, rng)
            else:
                assert kept.deviations is not None  # as `network` is not
                deviation = kept.deviations[here]
            deviation.toarray(out=network[start:end])
            network[start:end] += kept.zeros
        return network

    def _thinned(
        self,
        values: sp.csr_matrix,
        measured: NDArray[np.bool_],
        thinning: float,
        rng: np.random.Generator | None,
    ) -> sp.csr_matrix:
        if not self.has_counts:
            raise ValueError('Only integer counts under transform="log1p" can be thinned; set thinning=0.')
        if rng is None or not 0 < thinning < 1:
            raise ValueError(f"thinning={thinning} must lie in [0, 1) and needs rng.")
        data = rng.binomial(values.data.astype(np.int64), 1 - thinning).astype(np.float64)
        block = sp.csr_matrix((data, values.indices, values.indptr), shape=values.shape, copy=False)
        return self.schema.deviations(block, measured, np.asarray(block.sum(axis=1)).ravel())

    def _read(self, number: int) -> Kept:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        group = self.groups[number]
        values, measured = self._load(group), self._measured[group.slice_index]
        sizes = self._library_size[group.start : group.start + group.n_cells]
        deviations, zeros = self.schema.deviations(values, measured, sizes), self.schema.zeros(measured)
        if 4 * self.buffer_size * self.schema.n_genes <= DENSE_BYTES:
            network = deviations.toarray()
            network += zeros
            found = Kept(values, None, zeros, network)
        else:
            found = Kept(values, deviations, zeros, None)
        self._kept[number] = found
        while len(self._kept) > 1 and sum(self.groups[i].n_cells for i in self._kept) > self.buffer_size:
            self._kept.popitem(last=False)
        return found

    def _load(self, group: Group) -> sp.csr_matrix:
        path = self._paths[group.file]
        if group.file not in self._files:
            self._files[group.file] = open_parquet(path)
        file = self._files[group.file]
        columns = [name for name in (EXPRESSION, INDICES, VALUES) if name in file.schema_arrow.names]
        try:
            table: pa.Table = file.read_row_group(group.number, columns=columns)
        except (OSError, ValueError) as error:
            raise ValueError(f"Row group {group.number} of {path} is damaged; make the dataset again") from error
        return read_expression(table, self.schema.n_genes)
