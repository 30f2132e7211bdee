"""Consecutive rows of one slice, as a source of cells, and the plan by which they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from alphastomics.data._encode import Encoder, dense_rows
from alphastomics.data._sources import SliceCells
from alphastomics.data.parquet._columns import SIZE, SLICE, read_expression, read_position

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from alphastomics.data._schema import TissueSchema
    from alphastomics.data.parquet._dataset import DatasetInfo, Shard


class Stretch(NamedTuple):
    """Rows of a file that are read together, all of one slice.

    Attributes
    ----------
    file
        Number of the file in its split.
    offset
        Number of the first row in the file.
    start
        Number of the first row in the split.
    n_cells
        Number of rows.
    name
        The slice.
    """

    file: int
    offset: int
    start: int
    n_cells: int
    name: str


def plan_stretches(shards: list[Shard], buffer_size: int) -> list[list[Stretch]]:
    """Divide every file of a split: what it holds of a slice, in parts where that is more than ``buffer_size`` cells."""
    files, start = [], 0
    for number, shard in enumerate(shards):
        offset, here = 0, list[Stretch]()
        for name, groups in _runs(shard):
            n_parts = min(len(groups), -(-sum(groups) // buffer_size))
            for part in np.array_split(np.asarray(groups), n_parts):
                n_cells = int(part.sum())
                here.append(Stretch(number, offset, start, n_cells, name))
                offset, start = offset + n_cells, start + n_cells
        files.append(here)
    return files


def _runs(shard: Shard) -> Iterator[tuple[str, list[int]]]:
    """Slices of a file, and the sizes of their row groups."""
    name, groups = "", list[int]()
    for slice_name, n_cells in shard.groups:
        if groups and slice_name != name:
            yield name, groups
            groups = []
        name = slice_name
        groups.append(n_cells)
    if groups:
        yield name, groups


class StretchSource:
    """Cells that were read from a stream, as a source of contexts; see :class:`~alphastomics.data.CellSource`.

    Parameters
    ----------
    info
        The dataset.
    stretch
        Which rows these are.
    table
        Their columns.
    """

    buffer_size: int | None = None  # all of it is in memory

    def __init__(self, info: DatasetInfo, stretch: Stretch, table: pa.Table) -> None:
        self.schema: TissueSchema = info.schema
        self.has_counts = info.counts
        self.n_cells, self._start = stretch.n_cells, stretch.start
        rows = stretch.start + np.arange(stretch.n_cells)
        position = read_position(table)[:, : self.schema.n_dims]
        self.slices: tuple[SliceCells, ...] = (SliceCells(stretch.name, rows, position),)
        self.measured: NDArray[np.bool_] = ~np.isin(
            np.asarray(self.schema.genes, dtype=object), info.unmeasured.get(stretch.name, ())
        )
        self._library_size: NDArray[np.float64] = table.column(SIZE).to_numpy()
        self._values = read_expression(table, self.schema.n_genes)
        self._encoder = Encoder(self.schema, self.measured)

    def measured_in(self, slice_index: int) -> NDArray[np.bool_]:
        """Which genes of the schema the cells have, (G,)."""
        return self.measured

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """All cells in one piece."""
        return [np.arange(self.n_cells)]

    def sequence(self, rows: NDArray[np.int64]) -> None:
        """There is no order: datasets on disk hold none."""

    def library_size(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum of the measured values of some cells, (k,)."""
        return self._library_size[rows - self._start]

    def expression(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> NDArray[np.float32]:
        """Expression of some cells in network units, (k, G); see :meth:`AnnDataSource.expression`."""
        return self._encoder(*self.values(rows, thinning=thinning, rng=rng))

    def values(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Expression of some cells in user units, (k, G), and by what to multiply it; see :meth:`AnnDataSource.values`."""
        if thinning and not self.has_counts:
            raise ValueError('Only integer counts under transform="log1p" can be thinned; set thinning=0.')
        found = dense_rows(self._values[rows - self._start], self.schema.n_genes, thinning=thinning, rng=rng)
        size = found.sum(axis=1, dtype=np.float64) if thinning else self.library_size(rows)
        return found, self._encoder.factor(size)


def check_slice(table: pa.Table, stretch: Stretch, file: str) -> None:
    """Refuse rows that are not those that ``metadata.json`` announces.

    Raises
    ------
    ValueError
        If they are fewer, or of another slice.
    """
    if table.num_rows != stretch.n_cells or table.column(SLICE).unique().to_pylist() != [stretch.name]:
        raise ValueError(
            f"{file} has other cells than metadata.json says; pass the dataset as datasets.load_dataset gives it, neither "
            "filtered nor shuffled, or upload it again"
        )
