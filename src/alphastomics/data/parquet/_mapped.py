"""Expression of a row group from a file that is mapped into memory, without pyarrow.

pyarrow decodes a list column value by value, in every epoch: that is a tenth as fast as the in-memory loader of scvi-tools,
while copying rows of a mapped file is faster than it (``benchmarks/loading.py`` compares them). A column chunk that is one
page, neither compressed nor encoded, as ``preprocess`` writes expression, ends with its values. When a row group is first
read, pyarrow decodes its first cells, for which it verifies the checksum of the whole page. If the bytes of the mapped file
equal these cells, all cells are copied from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from alphastomics.data.parquet._columns import EXPRESSION, INDICES, LENGTH, VALUES, read_expression

if TYPE_CHECKING:
    import mmap

    import pyarrow.parquet as pq
    from numpy.typing import NDArray

N_DECODED = 16  # cells of a row group that pyarrow decodes


class SparseRows(NamedTuple):
    """Sparse cells of a row group in a mapped file.

    ``values`` (float32) and ``indices`` (int32, numbers of genes) are bytes at any alignment; ``start`` (n + 1,) is the
    first value of each cell.
    """

    values: memoryview
    indices: memoryview
    start: NDArray[np.int64]

    def take(self, rows: NDArray[np.int64], n_genes: int) -> sp.csr_matrix:
        """Select cells; joining their bytes is faster than indexing a matrix of scipy."""
        first, last = self.start[rows], self.start[rows + 1]
        parts = [slice(4 * a, 4 * b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        values = np.frombuffer(b"".join([self.values[part] for part in parts]), np.float32)
        indices = np.frombuffer(b"".join([self.indices[part] for part in parts]), np.int32)
        start = np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32)
        return sp.csr_matrix((values, indices, start), shape=(len(rows), n_genes), copy=False)


def map_rows(
    content: mmap.mmap, file: pq.ParquetFile, number: int, n_genes: int
) -> SparseRows | NDArray[np.uint8] | None:
    """Cells of a row group in the mapped file, dense ones as bytes (n, 4 G); None unless the file stores them plain.

    Raises an error of pyarrow for a page with another checksum, and ``ValueError`` for numbers of genes out of range.
    """
    row_group, columns = file.metadata.row_group(number), set(file.schema_arrow.names)
    n_cells, names = row_group.num_rows, [name for name in (EXPRESSION, INDICES, VALUES) if name in columns]
    if not n_cells or (EXPRESSION not in columns and LENGTH not in columns):
        return None
    head = read_expression(
        pa.Table.from_batches([next(file.iter_batches(N_DECODED, [number], names, use_threads=False))]), n_genes
    )
    if isinstance(head, np.ndarray):
        dense = _map_values(content, row_group, EXPRESSION, head, n_cells * n_genes)
        return None if dense is None else dense.reshape(n_cells, -1)
    length = file.read_row_group(number, columns=[LENGTH], use_threads=False).column(LENGTH).to_numpy()
    start = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])
    n_stored = int(start[-1]) + int((length == 0).sum())  # an empty list counts as one value
    if any(_chunk(row_group, name).num_values != n_stored for name in (VALUES, INDICES)):
        return None
    values = _map_values(content, row_group, VALUES, head.data, int(start[-1]))
    indices = _map_values(content, row_group, INDICES, head.indices, int(start[-1]))
    if values is None or indices is None:
        return None
    genes = indices.view(np.int32)
    if not 0 <= genes.min() <= genes.max() < n_genes:
        raise ValueError(f"{INDICES} must lie in 0 … {n_genes - 1}")
    return SparseRows(values.data, indices.data, start)


def _map_values(
    content: mmap.mmap, row_group: pq.RowGroupMetaData, name: str, head: NDArray[np.generic], n_values: int
) -> NDArray[np.uint8] | None:
    """The last bytes of a column chunk of four-byte values, if they begin with the decoded values, else None."""
    chunk = _chunk(row_group, name)
    end = chunk.data_page_offset + chunk.total_compressed_size
    start = end - 4 * n_values
    is_plain = chunk.compression == "UNCOMPRESSED" and not chunk.has_dictionary_page
    if not is_plain or not n_values or not 0 <= start < end <= len(content):
        return None
    stored = np.frombuffer(content, np.uint8, 4 * n_values, start)
    decoded = np.ascontiguousarray(head).reshape(-1).view(np.uint8)
    # Zeros could also equal other bytes of a column that consists of several pages.
    return stored if decoded.any() and np.array_equal(stored[: len(decoded)], decoded) else None


def _chunk(row_group: pq.RowGroupMetaData, name: str) -> pq.ColumnChunkMetaData:
    chunks = [row_group.column(i) for i in range(row_group.num_columns)]
    (chunk,) = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == name]
    return chunk
