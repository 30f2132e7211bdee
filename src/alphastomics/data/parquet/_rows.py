"""Rows of a table that anyone may have written, with the columns of a dataset.

Lists may be of one length or of any, of any numbers, and cells of several slices may stand together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from alphastomics.data.parquet._columns import (
    CELL,
    EXPRESSION,
    INDICES,
    LABEL,
    N_AXES,
    POSITION,
    SIZE,
    SLICE,
    VALUES,
)

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

OURS = frozenset({CELL, SLICE, LABEL, SIZE, POSITION, EXPRESSION, INDICES, VALUES, "n_genes"})


class Part(NamedTuple):
    """Cells of a row group.

    Attributes
    ----------
    names
        (N,).
    slices, labels
        (N,), None where one is missing; None where there are none at all.
    position
        (N, D); None where there is none.
    expression
        CSR (N, G).
    others
        Further columns.
    """

    names: NDArray[np.object_]
    slices: NDArray[np.object_] | None
    labels: NDArray[np.object_] | None
    position: NDArray[np.float64] | None
    expression: sp.csr_matrix
    others: pd.DataFrame | None


def read_part(table: pa.Table, n_genes: int) -> Part:
    """The cells of a table.

    Raises
    ------
    ValueError
        If columns are missing, or hold something else.
    """
    names = set(table.column_names)
    if CELL not in names or not (EXPRESSION in names or {INDICES, VALUES} <= names):
        raise ValueError(f"it needs the columns {CELL} and {EXPRESSION}, or {CELL}, {INDICES} and {VALUES}")
    if table.column(CELL).null_count:
        raise ValueError(f"{CELL} is missing for {table.column(CELL).null_count} cells")

    def strings(name: str) -> NDArray[np.object_] | None:
        if name not in names:
            return None
        column = table.column(name).cast(pa.string())
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=object)

    identifiers = strings(CELL)
    assert identifiers is not None  # as above
    position = _matrix(table.column(POSITION), POSITION, np.float64) if POSITION in names else None
    if position is not None and position.shape[1] not in (2, N_AXES):
        raise ValueError(f"{POSITION} has {position.shape[1]} coordinates, not 2 or 3")
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
    others = [f.name for f in table.schema if f.name not in OURS and any(kind(f.type) for kind in kinds)]
    return Part(
        identifiers,
        strings(SLICE),
        strings(LABEL),
        position,
        _dense(table, n_genes) if EXPRESSION in names else _sparse(table, n_genes),
        table.select(others).to_pandas(ignore_metadata=True) if others else None,
    )


def _dense(table: pa.Table, n_genes: int) -> sp.csr_matrix:
    values = _matrix(table.column(EXPRESSION), EXPRESSION, np.float32)
    if values.shape[1] != n_genes:
        raise ValueError(f"{EXPRESSION} has {values.shape[1]} values, and there are {n_genes} genes")
    return sp.csr_matrix(values)


def _sparse(table: pa.Table, n_genes: int) -> sp.csr_matrix:
    columns, lengths = _lists(table.column(INDICES), INDICES, np.int64)
    values, same = _lists(table.column(VALUES), VALUES, np.float32)
    if not np.array_equal(lengths, same):
        raise ValueError(f"{INDICES} and {VALUES} differ in length")
    if len(columns) and not 0 <= columns.min() <= columns.max() < n_genes:
        raise ValueError(f"{INDICES} must lie in 0 … {n_genes - 1}, as there are {n_genes} genes")
    x = sp.csr_matrix((values, columns, np.concatenate([[0], np.cumsum(lengths)])), shape=(len(lengths), n_genes))
    x.sort_indices()
    if not x.has_canonical_format:
        raise ValueError(f"{INDICES} names a gene of a cell twice")
    return x


def _matrix(column: pa.ChunkedArray, name: str, dtype: type) -> NDArray[Any]:
    """Lists of one length as rows."""
    values, lengths = _lists(column, name, dtype)
    if len(lengths) and (lengths != lengths[0]).any():
        raise ValueError(f"{name} has lists of different lengths")
    return values.reshape(len(lengths), -1) if len(values) else np.empty((len(lengths), 0), dtype=dtype)


def _lists(column: pa.ChunkedArray, name: str, dtype: type) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Values of lists one after the other, and the lengths of the lists."""
    kind = column.type
    fixed = pa.types.is_fixed_size_list(kind)
    if not (fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise ValueError(f"{name} is a column of {kind}, not of lists")
    if not (pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)):
        raise ValueError(f"{name} holds lists of {kind.value_type}, not of numbers")
    if column.null_count:
        raise ValueError(f"{name} is missing for {column.null_count} cells")
    flat = column.combine_chunks().flatten()
    if flat.null_count and dtype is np.int64:
        raise ValueError(f"{name} has missing values")
    lengths = np.full(len(column), kind.list_size) if fixed else column.combine_chunks().value_lengths()
    return flat.to_numpy(zero_copy_only=False).astype(dtype), np.asarray(lengths, dtype=np.int64)
