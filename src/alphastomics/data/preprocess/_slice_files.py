"""Slices on their way from stage 1 to stage 2: Arrow files, a batch of cells at a time, each batch with a checksum.

They are written once, read a few times and thrown away, so that they are not compressed.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from alphastomics.data.parquet._columns import Cells, arrow_schema, from_arrow, to_arrow
from alphastomics.data.parquet._files import replacing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

SUFFIX = ".arrow"
BATCH = 2048  # cells; every batch of a file but the last has so many


class SliceWriter:
    """Batches of an open file.

    Parameters
    ----------
    file
        The file.
    schema
        Its columns.

    Attributes
    ----------
    checksums
        Of the batches so far.
    """

    def __init__(self, file: pa.ipc.RecordBatchFileWriter, schema: pa.Schema) -> None:
        self._file, self._schema = file, schema
        self.checksums: list[int] = []

    def write(self, cells: Cells) -> None:
        """Write a batch."""
        self._file.write_table(to_arrow(cells, self._schema))
        self.checksums.append(_checksum(cells))


@contextmanager
def writing_slice(path: Path, n_genes: int) -> Iterator[SliceWriter]:
    """Write a file; it appears when it is whole."""
    schema = arrow_schema(n_genes, dense=False)
    with replacing(path) as temporary, pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        yield SliceWriter(file, schema)


def read_cells(path: Path, rows: NDArray[np.integer], n_genes: int, checksums: Sequence[int]) -> Iterator[Cells]:
    """Cells of ascending rows, by batches of the file.

    Raises
    ------
    ValueError
        If the file is damaged.
    """
    ends = np.searchsorted(rows, np.arange(len(checksums) + 1) * BATCH)
    with _damage(path), pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as file:
        for number, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            if start == end:
                continue
            batch, here = pa.Table.from_batches([file.get_batch(number)]), rows[start:end] - number * BATCH
            if here[0] > 0 and 2 * len(here) < len(batch):
                yield from_arrow(batch.take(here), n_genes)
                continue
            cells = from_arrow(batch, n_genes)
            if here[0] == 0 and _checksum(cells) != checksums[number]:  # once, of all who read some of the batch
                raise OSError(f"checksum of batch {number}")
            yield cells if len(here) == len(cells.names) else cells.take(here)


def read_column(path: Path, name: str) -> pa.Table:
    """One column of all cells.

    Raises
    ------
    ValueError
        If the file is damaged.
    """
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
