"""Expression of a row group from the mapped file, the one way around pyarrow.

The values of a column chunk that is one page, neither compressed nor encoded, as ``preprocess`` writes expression, are the
last bytes of that chunk. pyarrow decodes such a list column value by value in every epoch, which is slower than the
in-memory loader of scvi-tools; a row of the mapped file is copied at once (``benchmarks/loading.py`` compares them). A row
group is therefore decoded by pyarrow once, which verifies the checksums of its pages, and taken from the mapped file from
then on if its bytes there are the decoded ones.
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

    Attributes
    ----------
    values, indices
        Bytes of the values, float32, and of the numbers of their genes, int32, at any alignment.
    start
        First value of each cell, (n + 1,).
    """

    values: memoryview
    indices: memoryview
    start: NDArray[np.int64]

    def take(self, rows: NDArray[np.int64], n_genes: int) -> sp.csr_matrix:
        """Some cells; joining their bytes is faster than indexing a matrix of scipy."""
        first, last = self.start[rows], self.start[rows + 1]
        parts = [slice(4 * a, 4 * b) for a, b in zip(first.tolist(), last.tolist(), strict=True)]
        values = np.frombuffer(b"".join([self.values[part] for part in parts]), np.float32)
        indices = np.frombuffer(b"".join([self.indices[part] for part in parts]), np.int32)
        start = np.concatenate([[0], np.cumsum(last - first)]).astype(np.int32)
        return sp.csr_matrix((values, indices, start), shape=(len(rows), n_genes), copy=False)


def map_rows(
    content: mmap.mmap, row_group: pq.RowGroupMetaData, decoded: sp.csr_matrix | NDArray[np.float32]
) -> SparseRows | NDArray[np.uint8] | None:
    """The cells that pyarrow decoded from a row group, in the mapped file; None if they are stored in another way.

    Parameters
    ----------
    content
        The file.
    row_group
        Where its columns are.
    decoded
        Expression (n, G).

    Returns
    -------
    The bytes of dense cells, (n, 4 G), or :class:`SparseRows`.
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
    """The last bytes of a column chunk, if they are the decoded values."""
    chunks = [row_group.column(i) for i in range(row_group.num_columns)]
    (chunk,) = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] == name]
    end = chunk.data_page_offset + chunk.total_compressed_size
    start = end - decoded.nbytes
    if chunk.compression != "UNCOMPRESSED" or not decoded.nbytes or not 0 <= start < end <= len(content):
        return None
    stored = np.frombuffer(content, np.uint8, decoded.nbytes, start)
    return stored if np.array_equal(stored, np.ascontiguousarray(decoded).reshape(-1).view(np.uint8)) else None
