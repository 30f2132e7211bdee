"""Values of a column straight from a mapped file, where it is stored as we store expression.

The values of a column chunk that is one page, neither compressed nor encoded, are the end of that page, as they lie in memory.
pyarrow reads the same page through its levels, value by value. What is stored in another way is
left to pyarrow, as is finding out what is wrong with a header that makes no sense.

A page is preceded by its header, a Thrift structure, ``PageHeader`` of the Parquet format.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from alphastomics.data.parquet._thrift import read_struct

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

    from alphastomics.data.parquet._footer import Chunk

LONGEST_HEADER = 128
KIND, SIZE, STORED, CHECKSUM, DATA = 1, 2, 3, 4, 5  # fields of PageHeader
N_VALUES, ENCODING = 1, 2  # fields of DataPageHeader
DATA_PAGE, PLAIN = 0, 0


def mapped_values(file: mmap.mmap, chunk: Chunk, n_values: int, dtype: type[np.generic]) -> NDArray[np.uint8] | None:
    """The bytes of the values of a column chunk, without a copy; None if they are stored in another way.

    Parameters
    ----------
    file
        The whole file.
    chunk
        What its footer says of the column chunk.
    n_values
        Number of values that are not null.
    dtype
        Of a value.

    Raises
    ------
    ValueError
        If the page does not have the checksum that its header gives.
    """
    if chunk.is_compressed or chunk.has_dictionary:
        return None
    start = chunk.start
    try:
        header, length = read_struct(file[start : start + LONGEST_HEADER])
        data = header[DATA]
        size, expected = header[STORED], header[CHECKSUM]
        alone = (
            header[KIND] == DATA_PAGE
            and data[ENCODING] == PLAIN
            and data[N_VALUES] == chunk.n_values
            and header[SIZE] == size
            and length + size == chunk.n_bytes
        )
    except (IndexError, KeyError, TypeError, ValueError):
        return None
    n_bytes = n_values * np.dtype(dtype).itemsize
    if not alone or n_bytes > size:
        return None
    page = np.frombuffer(file, np.uint8, size, start + length)
    if zlib.crc32(page.data) != expected % 2**32:
        raise ValueError("a page does not have its checksum")
    return page[size - n_bytes :]
