"""Expression of a row group from a file that is mapped into memory, without pyarrow.

A column chunk that is one page, neither compressed nor encoded, as ``preprocess`` writes expression, ends with its
values. pyarrow decodes such a list column value by value in every epoch, which is slower than the in-memory loader of
scvi-tools, whereas a row of the mapped file is copied at once (``benchmarks/loading.py`` compares them). Therefore
pyarrow decodes a row group once, which verifies the checksums of its pages. If the bytes of the mapped file equal the
decoded values, later reads copy from the mapped file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy.sparse as sp

from alphastomics.data.parquet._columns import EXPRESSION, INDICES, VALUES

if TYPE_CHECKING:
    import mmap

    import pyarrow.parquet as pq
    from numpy.typing import NDArray


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
    content: mmap.mmap, row_group: pq.RowGroupMetaData, decoded: sp.csr_matrix | NDArray[np.float32]
) -> SparseRows | NDArray[np.uint8] | None:
    """Cells of a row group in the mapped file, if its bytes there equal ``decoded`` (n, G), else None.

    Dense cells are returned as bytes (n, 4 G), others as :class:`SparseRows`.
    """
    if isinstance(decoded, np.ndarray):
        dense = _map_values(content, row_group, EXPRESSION, decoded)
        return None if dense is None else dense.reshape(len(decoded), -1)
    values = _map_values(content, row_group, VALUES, decoded.data)
    indices = _map_values(content, row_group, INDICES, decoded.indices)
    if values is None or indices is None:
        return None
    return SparseRows(values.data, indices.data, decoded.indptr.astype(np.int64))


def _map_values(
    content: mmap.mmap, row_group: pq.RowGroupMetaData, name: str, decoded: NDArray[np.generic]
) -> NDArray[np.uint8] | None:
    """The last bytes of a column chunk, if they equal the decoded values, else None."""
    chunks = [row_group.column(i) for i in range(row_group.num_columns)]
    (chunk,) = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == name]
    end = chunk.data_page_offset + chunk.total_compressed_size
    start = end - decoded.nbytes
    if chunk.compression != "UNCOMPRESSED" or not decoded.nbytes or not 0 <= start < end <= len(content):
        return None
    stored = np.frombuffer(content, np.uint8, decoded.nbytes, start)
    return stored if np.array_equal(stored, np.ascontiguousarray(decoded).reshape(-1).view(np.uint8)) else None
