"""Shards, the files of a dataset: which cells they hold, how they are written, and statistics of their cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from alphastomics._io._atomic import replacing
from alphastomics.data._matrix import Moments, column_sums, row_blocks
from alphastomics.data.parquet._columns import arrow_schema
from alphastomics.data.parquet._dataset import SPLITS, GeneMetadata, Shard
from alphastomics.data.parquet._files import checksum
from alphastomics.data.parquet._write import writing

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from alphastomics.data.parquet._columns import Cells
    from alphastomics.data.preprocess._slice import StoredSlice

STATISTICS = ".npz"  # suffix of the file with the statistics of a shard

Piece: TypeAlias = "tuple[StoredSlice, tuple[NDArray[np.integer], ...]]"


@dataclass(frozen=True, kw_only=True)
class ShardTask:
    """Writing of one file.

    ``pieces`` are slices and their rows in the file, by row groups; ``dense`` is whether zeros are stored.
    ``library_size`` is the median at which moments of counts are taken, None without counts, and ``share`` (G,) the
    share of every gene in the counts, empty without counts. With ``log_transform``, slices of counts are stored as
    logarithms at that size, because other slices already are, or because they are scaled. With ``per_slice``, genes are
    stored with mean 0 and variance 1 among all cells of their slice.
    """

    target: Path
    split: str
    pieces: tuple[Piece, ...]
    dense: bool
    library_size: float | None
    share: NDArray[np.float64]
    log_transform: bool
    per_slice: bool = False


class WrittenShard(NamedTuple):
    """A written file.

    ``shard`` is its entry in ``metadata.json``; ``moments`` and ``totals`` (G,), the sums of counts, are over its
    training cells.
    """

    shard: Shard
    moments: Moments
    totals: NDArray[np.float64]


def write_shard(task: ShardTask) -> WrittenShard:
    """Write a shard and a file of its statistics, unless both exist; return both."""
    statistics = task.target.with_suffix(STATISTICS)
    if not (statistics.is_file() and task.target.is_file()):
        _write(task, statistics)
    groups = tuple((stored.name, len(rows)) for stored, rows_of_groups in task.pieces for rows in rows_of_groups)
    with np.load(statistics) as found:
        shard = Shard(file=task.target.name, split=task.split, groups=groups, sha256=str(found["sha256"]))
        moments = Moments(len(found["totals"]))
        moments.n_cells, moments.mean, moments.squares = found["n_cells"], found["mean"], found["squares"]
        return WrittenShard(shard, moments, found["totals"])


def _write(task: ShardTask, statistics: Path) -> None:
    statistics.unlink(missing_ok=True)  # this file marks a finished shard
    n_genes = len(task.pieces[0][0].genes)
    moments, totals = Moments(n_genes), np.zeros(n_genes)
    schema = arrow_schema(n_genes, dense=task.dense).with_metadata(_describe(task).to_metadata())
    with writing(task.target, schema, mapped=True) as file:
        for stored, rows_of_groups in task.pieces:
            slice_moments = _moments(stored, task) if task.per_slice else None
            for rows in rows_of_groups:
                parts = []
                for part in stored.cells(rows):
                    if task.split == SPLITS[0] and not task.per_slice:  # these are standardized already
                        _add_to_moments(part, stored, task, moments, totals)
                    part = _log_transform(part, stored, task) if task.log_transform else part
                    parts.append(part if slice_moments is None else _standardize(part, stored, slice_moments))
                pa.default_memory_pool().release_unused()  # else memory of reading and of writing would add up
                file.write(*parts)
    with replacing(statistics, unique=True) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            sha256=checksum(task.target),
            n_cells=moments.n_cells,
            mean=moments.mean,
            squares=moments.squares,
            totals=totals,
        )


def _describe(task: ShardTask) -> GeneMetadata:
    """Metadata of the Parquet schema."""
    first = task.pieces[0][0]
    lacking = {each.name: tuple(each.record["unmeasured"]) for each, _ in task.pieces if each.record["unmeasured"]}
    return GeneMetadata(first.genes, first.n_dims, lacking)


def _add_to_moments(
    cells: Cells, stored: StoredSlice, task: ShardTask, moments: Moments, totals: NDArray[np.float64]
) -> None:
    """Add cells to moments and totals, in place."""
    for rows in row_blocks(np.arange(len(cells.names)), len(stored.genes)):
        block = cells.expression[rows[0] : rows[-1] + 1]
        if stored.is_counts:
            totals += column_sums(block)
            block = _log_counts(block, cells.library_size[rows], stored, task)
        moments.add(block, stored.measured)


def _moments(stored: StoredSlice, task: ShardTask) -> Moments:
    """Moments of all cells of a slice, of the logarithms of counts."""
    moments = Moments(len(stored.genes))
    for part in stored.cells(np.arange(stored.n_cells, dtype=np.int32)):
        _add_to_moments(part, stored, task, moments, np.zeros(len(stored.genes)))
    return moments


def _standardize(cells: Cells, stored: StoredSlice, moments: Moments) -> Cells:
    """Scale genes to mean 0 and variance 1 in their slice; genes that it lacks, or that do not vary there, are 0."""
    varies = stored.measured & (moments.sd > 0)
    inverse = np.divide(1.0, moments.sd, out=np.zeros(len(varies)), where=varies)
    values = (cells.expression.toarray() - moments.mean) * inverse
    return cells._replace(expression=sp.csr_matrix(values.astype(np.float32)))


def _log_transform(cells: Cells, stored: StoredSlice, task: ShardTask) -> Cells:
    if not stored.is_counts:
        return cells
    logs = _log_counts(cells.expression, cells.library_size, stored, task)
    return cells._replace(expression=logs.astype(np.float32))


def _log_counts(block: sp.csr_matrix, size: NDArray[np.float64], stored: StoredSlice, task: ShardTask) -> sp.csr_matrix:
    """log1p of counts at the common library size, float64."""
    assert task.library_size is not None  # there are counts
    target = task.library_size
    if not stored.measured.all():
        target *= float(task.share[stored.measured].sum())
    factor = np.divide(target, size, out=np.ones(len(size)), where=size > 0)
    data = np.log1p(block.data * np.repeat(factor, np.diff(block.indptr)))
    return sp.csr_matrix((data, block.indices, block.indptr), shape=block.shape, copy=False)
