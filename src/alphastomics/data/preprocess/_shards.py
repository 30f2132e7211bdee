"""Shards, the files of a dataset: their cells, how they are written, and statistics of their cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from alphastomics._io._atomic import replacing
from alphastomics.data._matrix import Moments, column_sums, row_blocks
from alphastomics.data.parquet._columns import arrow_schema
from alphastomics.data.parquet._dataset import SPLITS, Note, Shard
from alphastomics.data.parquet._files import checksum
from alphastomics.data.parquet._write import writing

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from alphastomics.data.parquet._columns import Cells
    from alphastomics.data.preprocess._slice import StoredSlice

NOTE = ".npz"

Piece: TypeAlias = "tuple[StoredSlice, tuple[NDArray[np.integer], ...]]"


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """A file to be written.

    Parameters
    ----------
    target
        The file.
    split
        Of which split.
    pieces
        Slices and the rows of each that go into it, in row groups.
    dense
        Whether zeros are stored.
    library_size
        Median library size, at which moments of counts are taken; None where there are none.
    share
        Share of every gene in the counts (G,); empty where there are none.
    logarithms
        Whether slices of counts are stored as logarithms at that size, because others already are, or are to be scaled.
    per_slice
        Whether genes are stored with mean 0 and variance 1 among all cells of their slice.
    """

    target: Path
    split: str
    pieces: tuple[Piece, ...]
    dense: bool
    library_size: float | None
    share: NDArray[np.float64]
    logarithms: bool
    per_slice: bool = False


class Written(NamedTuple):
    """A file that is written.

    Attributes
    ----------
    shard
        Its entry in ``metadata.json``.
    moments
        Of its cells if they are training cells, else of none.
    totals
        Sums of their counts (G,).
    """

    shard: Shard
    moments: Moments
    totals: NDArray[np.float64]


def write_shard(task: ShardTask) -> Written:
    """Write a shard and a note of its statistics, unless both exist; return the note."""
    note = task.target.with_suffix(NOTE)
    if not (note.is_file() and task.target.is_file()):
        _write(task, note)
    groups = tuple((stored.name, len(rows)) for stored, rows_of_groups in task.pieces for rows in rows_of_groups)
    with np.load(note) as found:
        shard = Shard(file=task.target.name, split=task.split, groups=groups, sha256=str(found["sha256"]))
        moments = Moments(len(found["totals"]))
        moments.n_cells, moments.mean, moments.squares = found["n_cells"], found["mean"], found["squares"]
        return Written(shard, moments, found["totals"])


def _write(task: ShardTask, note: Path) -> None:
    note.unlink(missing_ok=True)  # a file is finished when its note is there
    n_genes = len(task.pieces[0][0].genes)
    moments, totals = Moments(n_genes), np.zeros(n_genes)
    schema = arrow_schema(n_genes, dense=task.dense).with_metadata(_describe(task).to_metadata())
    with writing(task.target, schema, mapped=True) as file:
        for stored, rows_of_groups in task.pieces:
            of_slice = _moments(stored, task) if task.per_slice else None
            for rows in rows_of_groups:
                parts = []
                for part in stored.cells(rows):
                    if task.split == SPLITS[0] and not task.per_slice:  # these are scaled already
                        _learn(part, stored, task, moments, totals)
                    part = _as_logarithms(part, stored, task) if task.logarithms else part
                    parts.append(part if of_slice is None else _standardized(part, stored, of_slice))
                pa.default_memory_pool().release_unused()  # or what reading left would be there beside what writing needs
                file.write(*parts)
    with replacing(note, unique=True) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            sha256=checksum(task.target),
            n_cells=moments.n_cells,
            mean=moments.mean,
            squares=moments.squares,
            totals=totals,
        )


def _describe(task: ShardTask) -> Note:
    """Metadata of the schema of the file."""
    first = task.pieces[0][0]
    lacking = {each.name: tuple(each.record["unmeasured"]) for each, _ in task.pieces if each.record["unmeasured"]}
    return Note(first.genes, first.n_dims, lacking)


def _learn(cells: Cells, stored: StoredSlice, task: ShardTask, moments: Moments, totals: NDArray[np.float64]) -> None:
    """Add cells to moments and totals, in place."""
    for rows in row_blocks(np.arange(len(cells.names)), len(stored.genes)):
        block = cells.expression[rows[0] : rows[-1] + 1]
        if stored.is_counts:
            totals += column_sums(block)
            block = _logarithms(block, cells.library_size[rows], stored, task)
        moments.add(block, stored.measured)


def _moments(stored: StoredSlice, task: ShardTask) -> Moments:
    """Of all cells of a slice, as logarithms."""
    moments = Moments(len(stored.genes))
    for part in stored.cells(np.arange(stored.n_cells, dtype=np.int32)):
        _learn(part, stored, task, moments, np.zeros(len(stored.genes)))
    return moments


def _standardized(cells: Cells, stored: StoredSlice, moments: Moments) -> Cells:
    """Genes with mean 0 and variance 1 in their slice; those that it lacks, or that do not vary there, are 0."""
    varies = stored.measured & (moments.sd > 0)
    inverse = np.divide(1.0, moments.sd, out=np.zeros(len(varies)), where=varies)
    values = (cells.expression.toarray() - moments.mean) * inverse
    return cells._replace(expression=sp.csr_matrix(values.astype(np.float32)))


def _as_logarithms(cells: Cells, stored: StoredSlice, task: ShardTask) -> Cells:
    if not stored.is_counts:
        return cells
    logs = _logarithms(cells.expression, cells.library_size, stored, task)
    return cells._replace(expression=logs.astype(np.float32))


def _logarithms(block: sp.csr_matrix, size: NDArray[np.float64], stored: StoredSlice, task: ShardTask) -> sp.csr_matrix:
    """log1p of counts at the common library size, float64."""
    assert task.library_size is not None  # there are counts
    target = task.library_size
    if not stored.measured.all():
        target *= float(task.share[stored.measured].sum())
    factor = np.divide(target, size, out=np.ones(len(size)), where=size > 0)
    data = np.log1p(block.data * np.repeat(factor, np.diff(block.indptr)))
    return sp.csr_matrix((data, block.indices, block.indptr), shape=block.shape, copy=False)
