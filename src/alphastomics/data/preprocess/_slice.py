"""Slices between the stages: Arrow files in batches of cells, each with a checksum, written by stage 1 and read by stage 2.

They are written once, read a few times and deleted, and therefore not compressed.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from alphastomics._io._atomic import replacing
from alphastomics.data.parquet._columns import Cells, arrow_schema, from_arrow, to_arrow
from alphastomics.data.preprocess._records import read_overview, read_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from alphastomics.data.parquet._columns import Cells

SUFFIX = ".arrow"
BATCH = 2048  # cells of every batch but the last


class SliceWriter:
    """Writes batches to an open file; ``checksums`` are those of the batches so far."""

    def __init__(self, file: pa.ipc.RecordBatchFileWriter, schema: pa.Schema) -> None:
        self._file, self._schema = file, schema
        self.checksums: list[int] = []

    def write(self, cells: Cells) -> None:
        """Write a batch."""
        self._file.write_table(to_arrow(cells, self._schema))
        self.checksums.append(_checksum(cells))


@contextmanager
def writing_slice(path: Path, n_genes: int) -> Iterator[SliceWriter]:
    """Write a file atomically."""
    schema = arrow_schema(n_genes, dense=False)
    with (
        replacing(path, unique=True) as temporary,
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, schema) as file,
    ):
        yield SliceWriter(file, schema)


def read_cells(path: Path, rows: NDArray[np.integer], n_genes: int, checksums: Sequence[int]) -> Iterator[Cells]:
    """Cells of ascending rows, by batches of the file; raises ValueError if it is damaged."""
    ends = np.searchsorted(rows, np.arange(len(checksums) + 1) * BATCH)
    with _damage(path), pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        for number, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            if start == end:
                continue
            batch, local = pa.Table.from_batches([file.get_batch(number)]), rows[start:end] - number * BATCH
            if local[0] > 0 and 2 * len(local) < len(batch):
                yield from_arrow(batch.take(local), n_genes)
                continue
            cells = from_arrow(batch, n_genes)
            if local[0] == 0 and _checksum(cells) != checksums[number]:  # once, with its first cell
                raise OSError(f"checksum of batch {number}")
            yield cells if len(local) == len(cells.names) else cells.take(local)


def read_column(path: Path, name: str) -> pa.Table:
    """One column of all cells; raises ValueError if the file is damaged."""
    with _damage(path), pa.memory_map(str(path)) as source:
        number = pa.ipc.open_file(source).schema.get_field_index(name)
        options = pa.ipc.IpcReadOptions(included_fields=[number], use_threads=False)
        return pa.ipc.open_file(source, options=options).read_all()


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is damaged ({reason}); delete it and run the same command again") from error


def _checksum(cells: Cells) -> int:
    x, sum_ = cells.expression, 0
    for part in (x.indptr, x.indices, x.data, cells.library_size, cells.position):
        sum_ = zlib.crc32(pa.py_buffer(np.ascontiguousarray(part)), sum_)
    return zlib.crc32("\n".join([*cells.names, *map(str, cells.labels)]).encode(), sum_)


@dataclass(frozen=True, kw_only=True)
class StoredSlice:
    """A slice that stage 1 wrote: file, record, and options, genes and number of coordinates (2 or 3) of its folder."""

    path: Path
    record: dict[str, Any]
    options: dict[str, Any]
    genes: tuple[str, ...]
    n_dims: int

    @property
    def name(self) -> str:
        """Name of the slice."""
        return str(self.record["slice"])

    @property
    def n_cells(self) -> int:
        """Number of cells."""
        return int(self.record["n_cells"])

    @cached_property
    def measured(self) -> NDArray[np.bool_]:
        """Mask (G,) of the genes that it measures."""
        lacking = set(self.record["unmeasured"])
        return np.array([gene not in lacking for gene in self.genes], dtype=bool)

    @property
    def is_counts(self) -> bool:
        """Whether its values are counts, to be log-transformed."""
        return bool(self.options["log_normalize"])

    def column(self, name: str) -> pa.Table:
        """One column of all cells."""
        return read_column(self.path, name)

    def cells(self, rows: NDArray[np.integer]) -> Iterator[Cells]:
        """Cells of ascending rows, in several parts."""
        return read_cells(self.path, rows, len(self.genes), self.record["checksums"])


def read_slices(input_dirs: Sequence[Path]) -> list[StoredSlice]:
    """Slices of folders that stage 1 has finished, sorted by name.

    Raises ``FileNotFoundError`` for a folder without finished slices, and ``ValueError`` if folders differ in genes or
    number of coordinates, or repeat the name of a slice.
    """
    found: list[StoredSlice] = []
    for folder in input_dirs:
        overview = read_overview(folder)
        common = {"options": overview["options"], "genes": tuple(overview["genes"]), "n_dims": int(overview["n_dims"])}
        for entry in overview["slices"]:
            path = folder / f"{entry['file']}{SUFFIX}"
            record = read_record(path.with_suffix(".json"))
            record["totals"] = np.asarray(record["totals"])  # a list takes four times the memory
            found.append(StoredSlice(path=path, record=record, **common))
    _check_agreement(found)
    return sorted(found, key=lambda each: each.name)


def _check_agreement(slices: Sequence[StoredSlice]) -> None:
    first = slices[0]
    seen: dict[str, StoredSlice] = {}
    for each in slices:
        if each.genes != first.genes:
            differ = [
                f"{one!r} and {other!r}" for one, other in zip(first.genes, each.genes, strict=False) if one != other
            ]
            difference = differ[0] if differ else _extra_gene(first, each)
            raise ValueError(
                f"{first.path.parent} and {each.path.parent} have different gene lists (first difference: {difference}); run stage1 "
                "on both with the same --gene-list-file"
            )
        if each.n_dims != first.n_dims:
            raise ValueError(
                f"{first.path.parent} has positions in {first.n_dims}D and {each.path.parent} in {each.n_dims}D; run stage1 on "
                "both with the same --position-is-3d and --z-spacing"
            )
        if each.name in seen:
            raise ValueError(
                f"slice {each.name!r} is in both {seen[each.name].path.parent} and {each.path.parent}; rename one"
            )
        seen[each.name] = each


def _extra_gene(first: StoredSlice, other: StoredSlice) -> str:
    """The first gene that only the longer of two gene lists has, where one begins with the other."""
    longer, shorter = (first, other) if len(first.genes) > len(other.genes) else (other, first)
    return f"{longer.genes[len(shorter.genes)]!r}, which only {longer.path.parent} has"
