"""Cells as rows of a Parquet file.

================  ==================  ==========================================================================
column            type                what
================  ==================  ==========================================================================
``cell_id``       string              name of the cell
``slice_id``      string              its slice
``cell_type``     string, or null     its label; null where it is unknown
``library_size``  float64             sum of its values, over the genes that its slice measures
``position``      3 × float64         in the units of the input; z = 0, or number of the section times its spacing
``expression``    G × float32         untransformed, genes in the order of the schema
``indices``       list of int32       numbers of the genes whose values are not 0, ascending
``values``        list of float32     these values, untransformed
``n_genes``       int32               number of these values
================  ==================  ==========================================================================

A file has the column ``expression`` if more than a fifth of its values are not 0, else the last three columns. A row group
holds cells of one slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

if TYPE_CHECKING:
    from numpy.typing import NDArray

CELL, SLICE, LABEL, SIZE, POSITION = "cell_id", "slice_id", "cell_type", "library_size", "position"
EXPRESSION, INDICES, VALUES, LENGTH = "expression", "indices", "values", "n_genes"
N_AXES = 3
DENSE = 0.2  # share of values that are not 0 above which zeros are stored too: larger, but faster to read


class Cells(NamedTuple):
    """Cells of one slice.

    ``names``, ``labels`` (None where missing) and ``library_size`` (float64) are (N,), ``position`` is (N, 3) float64,
    and ``expression`` is untransformed CSR (N, G), float32.
    """

    names: NDArray[np.object_]
    slice_id: str
    labels: NDArray[np.object_]
    library_size: NDArray[np.float64]
    position: NDArray[np.float64]
    expression: sp.csr_matrix

    def take(self, rows: NDArray[np.integer]) -> Cells:
        """Select cells by row number."""
        return Cells(
            self.names[rows],
            self.slice_id,
            self.labels[rows],
            self.library_size[rows],
            self.position[rows],
            self.expression[rows],
        )


def arrow_schema(n_genes: int, *, dense: bool) -> pa.Schema:
    """Columns of a file; ``dense`` is whether zeros are stored."""
    fields = [
        pa.field(CELL, pa.string(), nullable=False),
        pa.field(SLICE, pa.string(), nullable=False),
        pa.field(LABEL, pa.string()),
        pa.field(SIZE, pa.float64(), nullable=False),
        pa.field(POSITION, pa.list_(pa.float64(), N_AXES), nullable=False),
    ]
    if dense:
        return pa.schema([*fields, pa.field(EXPRESSION, pa.list_(pa.float32(), n_genes), nullable=False)])
    fields.append(pa.field(LENGTH, pa.int32(), nullable=False))
    lists = [(INDICES, pa.int32()), (VALUES, pa.float32())]
    return pa.schema([*fields, *(pa.field(name, pa.list_(kind), nullable=False) for name, kind in lists)])


def to_arrow(cells: Cells, schema: pa.Schema) -> pa.Table:
    """Convert cells to a table with the columns of ``schema``."""
    n = len(cells.names)
    columns = {
        CELL: pa.array(cells.names, pa.string()),
        SLICE: pa.array([cells.slice_id] * n, pa.string()),
        LABEL: pa.array(cells.labels, pa.string()),
        SIZE: pa.array(cells.library_size, pa.float64()),
        POSITION: pa.FixedSizeListArray.from_arrays(pa.array(cells.position.ravel(), pa.float64()), N_AXES),
    }
    x = cells.expression
    if EXPRESSION in schema.names:
        values = pa.array(x.toarray().astype(np.float32, copy=False).ravel(), pa.float32())
        columns[EXPRESSION] = pa.FixedSizeListArray.from_arrays(values, x.shape[1])
    else:
        columns[LENGTH] = pa.array(np.diff(x.indptr).astype(np.int32, copy=False))
        offsets = pa.array(x.indptr.astype(np.int32, copy=False))
        columns[INDICES] = pa.ListArray.from_arrays(offsets, pa.array(x.indices.astype(np.int32, copy=False)))
        columns[VALUES] = pa.ListArray.from_arrays(offsets, pa.array(x.data.astype(np.float32, copy=False)))
    return pa.table([columns[name] for name in schema.names], schema=schema)


def from_arrow(table: pa.Table, n_genes: int) -> Cells:
    """Convert a table, whose cells are of one slice, to cells."""
    names = table.column(SLICE).unique().to_pylist()
    if len(names) != 1:
        raise ValueError(f"a row group holds cells of one slice, this one of {names}")
    return Cells(
        table.column(CELL).to_numpy(zero_copy_only=False).astype(object),
        names[0],
        table.column(LABEL).to_numpy(zero_copy_only=False).astype(object),
        table.column(SIZE).to_numpy(),
        read_position(table),
        sp.csr_matrix(read_expression(table, n_genes)),
    )


def read_position(table: pa.Table) -> NDArray[np.float64]:
    """Positions (N, 3) of a table."""
    flat = table.column(POSITION).combine_chunks().flatten()
    return np.asarray(flat, dtype=np.float64).reshape(-1, N_AXES)


def read_expression(table: pa.Table, n_genes: int) -> sp.csr_matrix | NDArray[np.float32]:
    """Expression (N, G) of a table, float32: an array where zeros are stored, else CSR."""
    if EXPRESSION in table.column_names:
        flat = table.column(EXPRESSION).combine_chunks().flatten()
        return np.asarray(flat, dtype=np.float32).reshape(-1, n_genes)
    indices, values = (table.column(name).combine_chunks() for name in (INDICES, VALUES))
    offsets = np.asarray(indices.offsets)
    data, columns = np.asarray(values.flatten()), np.asarray(indices.flatten())
    return sp.csr_matrix((data, columns, offsets - offsets[0]), shape=(len(indices), n_genes), copy=False)
