"""Sources of cells for contexts: the protocol, and the cells of an AnnData."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import scipy.sparse as sp

from alphastomics._io._errors import format_names
from alphastomics.data._checks import (
    check_genes,
    check_in_memory,
    check_key,
    expression_key,
    read_expression,
    read_position,
    read_sequence,
)
from alphastomics.data._encode import NOT_THINNED, Encoder, dense_rows, thin_rows
from alphastomics.data._matrix import Matrix, align_columns, canonical, row_blocks, row_sums
from alphastomics.data._plane import leave_out_column
from alphastomics.data._slices import encode_labels, resolve_query_slice_key, slice_rows
from alphastomics.data._values import describe_difference, log_kind

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data._schema import TissueSchema
    from alphastomics.data._values import ValueSummary


DEPTH_RATIO = 5.0  # of median library sizes, above which a warning is issued


class SliceCells(NamedTuple):
    """The cells of one slice.

    Attributes
    ----------
    name
        Name of the slice.
    rows
        Row numbers of its cells in the source, ascending.
    position
        Positions in user units, shape (n, D), float64, NaN where a cell has none; None when positions are not read.
    """

    name: str
    rows: NDArray[np.int64]
    position: NDArray[np.float64] | None


class CellSource(Protocol):
    """Cells in slices, with their expression in user units or network units."""

    @property
    def schema(self) -> TissueSchema:
        """The schema for which the cells are read."""

    @property
    def slices(self) -> tuple[SliceCells, ...]:
        """The slices, sorted by name."""

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Which genes of the schema any of the cells have, shape (G,)."""

    def measured_in(self, slice_index: int) -> NDArray[np.bool_]:
        """Which genes of the schema the cells of a slice have, shape (G,)."""

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """Numbers, within a slice, of the cells of each piece; a piece is read at once and is contiguous in the tissue."""

    @property
    def n_cells(self) -> int:
        """Number of cells."""

    @property
    def buffer_size(self) -> int | None:
        """Number of cells among which contexts are shuffled; None where all expression is in memory."""

    @property
    def has_counts(self) -> bool:
        """Whether the values are counts, or 0 and 1, of which a share can be removed at random."""

    def expression(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Expression of some cells in network units, shape (k, G)."""

    def values(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Expression of some cells in user units, (k, G), 0 for unmeasured genes, and its factors before the logarithm, (k,)."""

    def encode(self, values: NDArray[np.float32], factor: NDArray[np.float32], slice_index: int) -> NDArray[np.float32]:
        """Transform values of cells of a slice, as :meth:`values` returns them, to network units, in place."""

    def sequence(self, rows: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Index (k,) of some cells in their order, ``schema.sequence_key``; None where the cells have none."""

    def cell_type(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers (k,) of the cell types of some cells in ``schema.cell_types``, from 1; 0 where unknown."""

    def library_size(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum of the measured values of some cells, shape (k,)."""


class AnnDataSource:
    """Cells of an AnnData, read for a schema.

    Genes are matched by name. `adata` is neither modified nor kept; a CSR matrix whose genes are those of the schema
    in order is shared with it, any other sparse matrix is converted to CSR once.

    Parameters
    ----------
    adata
        The cells, in memory.
    schema
        The schema of the model.
    positions
        Whether to read ``obsm[schema.position_key]``. NaN (a cell without a position) is kept.
    expression
        Whether to read expression. If not, neither the matrix nor the gene names are read and no gene is measured.

    Raises
    ------
    KeyError
        If the layer, the positions or, for cells with positions, the slices are missing.
    ValueError
        If fewer than half of the genes are present, values are invalid or all zero, or they are of another kind than those of the
        reference.

    Warns
    -----
    UserWarning
        If genes are missing, or the median library size lies more than fivefold from that of the reference.
    """

    def __init__(self, adata: AnnData, schema: TissueSchema, *, positions: bool, expression: bool = True) -> None:
        check_in_memory(adata)
        _check_keys(adata, schema, positions=positions, expression=expression)
        self.schema = schema
        self.buffer_size: int | None = None
        self.n_cells: int = adata.n_obs
        self.slices = _read_slices(adata, schema, positions=positions)
        self.measured: NDArray[np.bool_] = np.zeros(schema.n_genes, dtype=bool)
        self.has_counts = False
        self._matrix: Matrix = np.empty((adata.n_obs, 0), dtype=np.float32)
        values = self._read_expression(adata) if expression else None
        self._order: NDArray[np.float64] | None = None
        if schema.sequence_key is not None and schema.sequence_key in adata.obs:
            self._order = read_sequence(adata, schema.sequence_key)
        self._cell_type = np.zeros(adata.n_obs, dtype=np.int64)
        if schema.cell_type_key is not None and schema.cell_type_key in adata.obs:
            self._cell_type = encode_labels(adata.obs[schema.cell_type_key], schema.cell_types)
        self._columns = np.flatnonzero(self.measured)
        self._library_size = self._sum_rows()
        self._encoder = Encoder(schema, self.measured)
        if values is not None:
            self._check_scale(values)

    def _read_expression(self, adata: AnnData) -> ValueSummary:
        columns = _match_genes(check_genes(adata.var_names), self.schema.genes)
        self.measured = columns >= 0
        matrix, transform, values = read_expression(adata, self.schema.layer, self.schema.transform)
        self._kind = values, transform
        self.has_counts = values.kind == "binary" or (transform == "log1p" and values.integer)
        matrix = align_columns(matrix, columns[self.measured])
        if not isinstance(matrix, np.ndarray) and not matrix.has_canonical_format:
            matrix = sp.csr_matrix(matrix, copy=True)
            matrix.sum_duplicates()
        self._matrix = matrix
        return values

    def log_kind(self) -> None:
        """Log the kind of the values that were read, and their transform."""
        log_kind(f"{self.n_cells} cells", *self._kind)

    def _sum_rows(self) -> NDArray[np.float64]:
        blocks = row_blocks(np.arange(self.n_cells), self._matrix.shape[1])
        sums = [row_sums(canonical(self._matrix[rows])) for rows in blocks]
        return np.concatenate(sums) if sums else np.empty(0)

    def _check_scale(self, values: ValueSummary) -> None:
        """Raise an error if values are zero or of another kind than those of the reference, and warn if their depth differs."""
        if self.n_cells and (
            not values.n_nonzero or (self.schema.transform == "log1p" and not self._library_size.any())
        ):
            raise ValueError(
                f"all values of these cells in {expression_key(self.schema.layer)} are zero for the genes of the reference; store their "
                "expression there, as in the reference."
            )
        message, depth, is_distant = describe_difference(self.schema.value_kind, values), "", False
        if self.schema.transform == "log1p":
            filled = self._library_size[self._library_size > 0]
            median = float(np.median(filled)) if len(filled) else 0.0
            target = self.schema.target_library_size(self.measured)
            is_distant = not target / DEPTH_RATIO <= median <= target * DEPTH_RATIO
            depth = (
                f"The median library size of these cells is {median:.4g}, but {target:.4g} in the reference on the same "
                f"{int(self.measured.sum())} genes"
            )
        if values.kind == "intensities" and self.schema.transform == "log1p" and not is_distant:
            message = None  # sampled or corrected counts, which are not integers, but as large as counts
        if message is not None:
            raise ValueError(f"{message} {depth}." if depth else message)
        if is_distant:
            warnings.warn(
                f"{depth}: more than {DEPTH_RATIO:g}-fold apart. Cells are scaled to the library size of the reference; check "
                "that the values are raw counts, as in the reference.",
                UserWarning,
                stacklevel=3,
            )

    def expression(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """Read expression in network units, (k, G), exactly 0 for unmeasured genes."""
        return self._encoder(*self.values(rows))

    def values(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Read expression in user units, (k, G), 0 for unmeasured genes, and its factors before the logarithm, (k,).

        The factors scale cells to the library size of the schema, and are not used under ``transform="none"``.

        Parameters
        ----------
        rows
            Row numbers, shape (k,).
        thinning
            Share of the counts to remove at random, in [0, 1): each count is kept with probability 1 - `thinning`. None or
            0 removes none.
        rng
            Generator of the random draws.

        Raises
        ------
        ValueError
            If `thinning` is positive and values are neither counts under ``"log1p"`` nor binary, or `rng` is None.
        """
        if thinning and not self.has_counts:
            raise ValueError(NOT_THINNED)
        block = self._matrix[rows]
        if isinstance(block, np.ndarray):
            found = np.zeros((len(block), self.schema.n_genes), dtype=np.float32)
            found[:, self._columns] = block
            if thinning:
                thin_rows(found, thinning, rng)
        else:
            found = dense_rows(block, self.schema.n_genes, columns=self._columns, thinning=thinning, rng=rng)
        size = found.sum(axis=1, dtype=np.float64) if thinning else self._library_size[rows]
        return found, self._encoder.factor(size)

    def encode(self, values: NDArray[np.float32], factor: NDArray[np.float32], slice_index: int) -> NDArray[np.float32]:
        """Transform values, as :meth:`values` returns them, to network units, in place."""
        return self._encoder(values, factor)

    def measured_in(self, slice_index: int) -> NDArray[np.bool_]:
        """Which genes of the schema the cells of a slice have, (G,); all slices have the same."""
        return self.measured

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """All cells of a slice in one piece, since everything is in memory."""
        return [np.arange(len(self.slices[slice_index].rows))]

    def sequence(self, rows: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Index of some cells in their order, shape (k,); None where the cells have none."""
        return None if self._order is None else self._order[rows]

    def cell_type(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the cell types of some cells, shape (k,); 0 without labels, or for one that the reference lacks."""
        return self._cell_type[rows]

    def library_size(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum the measured genes of some cells in user units, shape (k,)."""
        return self._library_size[rows]


def _check_keys(adata: AnnData, schema: TissueSchema, *, positions: bool, expression: bool) -> None:
    """Raise a KeyError for a key of the reference that is read and that these cells lack."""
    needed: list[tuple[str, Any, str | None, str]] = []
    if expression:
        needed += [("layers", adata.layers, schema.layer, "layer")]
    if positions:
        needed += [("obsm", adata.obsm, schema.position_key, "position_key")]
        needed += [("obs", adata.obs, schema.slice_key, "slice_key")]
    for where, mapping, key, argument in needed:
        if key is not None:
            remedy = f"store it there, where the reference has it, or fit the reference with another {argument}=…"
            check_key(where, mapping, key, argument, remedy)


def _read_slices(adata: AnnData, schema: TissueSchema, *, positions: bool) -> tuple[SliceCells, ...]:
    key = resolve_query_slice_key(adata, schema.slice_key, positions=positions)
    groups = slice_rows(adata, key, missing=not positions)
    if not positions:
        return tuple(SliceCells(name, rows, None) for name, rows in groups)
    position = read_position(adata, schema.position_key, missing=True, n_dims=None if schema.plane else schema.n_dims)
    return tuple(SliceCells(name, rows, leave_out_column(position[rows], schema, name)) for name, rows in groups)


def _match_genes(names: tuple[str, ...], genes: tuple[str, ...]) -> NDArray[np.int64]:
    """Column of each gene of the schema, -1 for a missing gene."""
    columns: NDArray[np.int64] = pd.Index(names).get_indexer(pd.Index(genes)).astype(np.int64)
    missing = [gene for gene, column in zip(genes, columns, strict=True) if column < 0]
    if not missing:
        return columns
    listed = format_names(missing)
    same = len({gene.casefold() for gene in missing} & {name.casefold() for name in names})
    case = f" {same} of them are present in another case: rename them as in the reference." if same else ""
    if len(missing) == len(genes):
        raise ValueError(
            f"var_names contains none of the {len(genes)} genes (reference: {listed}; these cells: {format_names(names)}); use "
            f"the gene identifiers of the reference.{case}"
        )
    if len(missing) > len(genes) / 2:
        raise ValueError(
            f"{len(missing)} of {len(genes)} genes are missing ({listed}), more than half; "
            f"train on shared genes: reference[:, reference.var_names.isin(query.var_names)].copy().{case}"
        )
    warnings.warn(
        f"{len(missing)} of {len(genes)} genes are missing and treated as unmeasured: {listed}.{case}",
        UserWarning,
        stacklevel=4,
    )
    return columns
