"""Reading Parquet files into an AnnData: a split of a dataset, or a single file with the same columns.

Files of other programs may store lists of different lengths, any numeric type, and cells of several slices in one row
group.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp

from alphastomics import _keys
from alphastomics._io._errors import describe_error, format_names
from alphastomics.data._checks import check_choice
from alphastomics.data._slices import NO_SLICE
from alphastomics.data.parquet._columns import (
    CELL,
    EXPRESSION,
    INDICES,
    LABEL,
    N_AXES,
    POSITION,
    SLICE,
    VALUES,
)
from alphastomics.data.parquet._dataset import FOLDER, METADATA, SPLITS, DatasetInfo, GeneMetadata
from alphastomics.data.parquet._files import open_parquet, read_group
from alphastomics.data.parquet._further import read_further

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from numpy.typing import NDArray

    from alphastomics.data.parquet._columns import Cells
    from alphastomics.data.parquet._dataset import Shard

logger = logging.getLogger(__name__)

UNMEASURED = "Slice %r lacks %d genes, which are treated as unmeasured: %s."


class Part(NamedTuple):
    """Cells of a row group.

    ``slices`` (N,), ``labels`` (N,), ``position`` (N, D) and ``others`` (further columns) are None if the file lacks
    these columns; single missing slices and labels are None. ``expression`` is CSR (N, G).
    """

    names: NDArray[np.object_]
    slices: NDArray[np.object_] | None
    labels: NDArray[np.object_] | None
    position: NDArray[np.float64] | None
    expression: sp.csr_matrix
    others: pd.DataFrame | None


def read_part(table: pa.Table, n_genes: int) -> Part:
    """Cells of a table; raises ValueError if columns are missing or of another type."""
    names = set(table.column_names)
    if CELL not in names or not (EXPRESSION in names or {INDICES, VALUES} <= names):
        raise ValueError(f"the columns {CELL} and {EXPRESSION}, or {CELL}, {INDICES} and {VALUES}, are required")
    if table.column(CELL).null_count:
        raise ValueError(f"{CELL} is missing for {table.column(CELL).null_count} cells")

    def strings(name: str) -> NDArray[np.object_] | None:
        if name not in names:
            return None
        column = table.column(name).cast(pa.string())
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=object)

    identifiers = strings(CELL)
    assert identifiers is not None  # the column is not optional
    position = _matrix(table.column(POSITION), POSITION, np.float64) if POSITION in names else None
    if position is not None and position.shape[1] not in (2, N_AXES):
        raise ValueError(f"{POSITION} has {position.shape[1]} coordinates, not 2 or 3")
    return Part(
        identifiers,
        strings(SLICE),
        strings(LABEL),
        position,
        _dense(table, n_genes) if EXPRESSION in names else _sparse(table, n_genes),
        read_further(table),
    )


def _dense(table: pa.Table, n_genes: int) -> sp.csr_matrix:
    values = _matrix(table.column(EXPRESSION), EXPRESSION, np.float32)
    if values.shape[1] != n_genes:
        raise ValueError(f"{EXPRESSION} has {values.shape[1]} values per cell, not one for each of {n_genes} genes")
    return sp.csr_matrix(values)


def _sparse(table: pa.Table, n_genes: int) -> sp.csr_matrix:
    columns, lengths = _lists(table.column(INDICES), INDICES, np.int64)
    values, same = _lists(table.column(VALUES), VALUES, np.float32)
    if not np.array_equal(lengths, same):
        raise ValueError(f"{INDICES} and {VALUES} differ in length")
    if len(columns) and not 0 <= columns.min() <= columns.max() < n_genes:
        raise ValueError(f"{INDICES} must lie in 0 … {n_genes - 1}")
    x = sp.csr_matrix((values, columns, np.concatenate([[0], np.cumsum(lengths)])), shape=(len(lengths), n_genes))
    x.sort_indices()
    if not x.has_canonical_format:
        raise ValueError(f"{INDICES} lists a gene twice for one cell")
    return x


def _matrix(column: pa.ChunkedArray, name: str, dtype: type) -> NDArray[Any]:
    """Lists of equal length as the rows of an array."""
    values, lengths = _lists(column, name, dtype)
    if len(lengths) and (lengths != lengths[0]).any():
        raise ValueError(f"{name} has lists of different lengths")
    return values.reshape(len(lengths), -1) if len(values) else np.empty((len(lengths), 0), dtype=dtype)


def _lists(column: pa.ChunkedArray, name: str, dtype: type) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Concatenated values of lists, and the lengths of the lists."""
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


def read_dataset(data_dir: str | PathLike[str], split: str = "test") -> ad.AnnData:
    """Read the cells of one split of a dataset into memory.

    Parameters
    ----------
    data_dir
        Folder written by ``alphastomics preprocess``.
    split
        ``"train"``, ``"validation"`` or ``"test"``.

    Returns
    -------
    The cells in the order of the files: ``X``, CSR of float32, (n_cells, n_genes), untransformed; ``obs["slice_id"]``,
    ``obs["cell_type"]`` if the dataset has labels, and ``obsm["spatial"]``, (n_cells, 2) or (n_cells, 3). Genes that none of
    these slices measures are removed. If slices measure different genes, ``varm["measured_in"]``, (n_genes, n_slices),
    holds which slices measure a gene; for other slices its value is missing, and stored as 0. Select slices that measure
    the same genes, ``adata[slice, adata.varm["measured_in"][slice_id]]``, before you use the values.

    Raises
    ------
    FileNotFoundError, ValueError
        If the dataset is missing or incomplete, or the split has no cells.
    """
    folder = Path(data_dir)
    info = DatasetInfo.read(folder)
    check_choice("split", split, SPLITS)
    shards = [shard for shard in info.shards if shard.split == split]
    if not shards:
        found = ", ".join(repr(name) for name in SPLITS if any(shard.split == name for shard in info.shards))
        raise ValueError(f"{folder} has no cells in split={split!r}; choose from {found or 'none'}")
    parts = [
        Part(cells.names, np.full(len(cells.names), cells.slice_id, dtype=object), *cells[2:3], *cells[4:], None)
        for shard in shards
        for cells in _read_shard(folder / FOLDER / shard.file, shard, info)
    ]
    try:
        return to_anndata(parts, GeneMetadata(info.schema.genes, info.schema.n_columns, info.unmeasured))
    except Exception as error:  # a damaged dataset can raise anything
        raise ValueError(f"{folder}: {describe_error(error)}; make the dataset again") from error


def _read_shard(path: Path, shard: Shard, info: DatasetInfo) -> Iterator[Cells]:
    """Row groups of a file; raises ValueError unless they are those that ``metadata.json`` lists."""
    n_genes = info.schema.n_genes
    with open_parquet(path) as file:
        found = file.num_row_groups
        if found != len(shard.groups):
            raise ValueError(f"{path} has {found} row groups, not {len(shard.groups)}; make the dataset again")
        for number, (name, n_cells) in enumerate(shard.groups):
            cells = read_group(file, number, n_genes, path)
            if (cells.slice_id, len(cells.names)) != (name, n_cells):
                raise ValueError(
                    f"Row group {number} of {path} has {len(cells.names)} cells of {cells.slice_id!r}, not {n_cells} of "
                    f"{name!r}; make the dataset again"
                )
            yield cells


def read_parquet(path: str | PathLike[str]) -> ad.AnnData:
    """Read the cells of a single file into memory.

    Parameters
    ----------
    path
        Parquet file with the columns ``cell_id`` and ``expression``, or ``cell_id``, ``indices`` and ``values``, and optional
        columns ``slice_id``, ``cell_type`` and ``position``: a file of a dataset, or of :func:`write_parquet`. The names of
        the genes are in its metadata, or in those of the dataset in whose folder ``data`` it is.

    Returns
    -------
    The cells, as :func:`read_dataset` returns them; further columns of numbers, booleans and strings are columns of ``obs``.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file is missing or incomplete, has no names of genes, or lacks columns.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        schema = file.schema_arrow
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(
            f"{path} is not a complete Parquet file ({describe_error(error)}); make it again, or choose another"
        ) from error
    with file:
        metadata = _read_gene_metadata(path, schema)
        parts = []
        for number in range(file.num_row_groups):
            try:
                table = file.read_row_group(number)
                if len(table):
                    parts.append(read_part(table, len(metadata.genes)))
            except Exception as error:  # a damaged file can raise anything
                raise ValueError(f"Row group {number} of {path} cannot be used: {describe_error(error)}") from error
    try:
        return to_anndata(parts, metadata)
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"{path}: {describe_error(error)}") from error


def _read_gene_metadata(path: Path, schema: pa.Schema) -> GeneMetadata:
    """Genes in the metadata of the file, else those of its dataset."""
    try:
        metadata = GeneMetadata.from_metadata(schema.metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if metadata is not None:
        return metadata
    folder = path.absolute().parent.parent
    if not (folder / METADATA).is_file():
        raise ValueError(
            f"{path} does not list its genes, and {folder / METADATA} is missing; keep the file in its dataset, "
            "or write it with alphastomics.data.write_parquet"
        )
    info = DatasetInfo.read(folder, check=False)
    return GeneMetadata(info.schema.genes, info.schema.n_columns, info.unmeasured)


def to_anndata(parts: Sequence[Part], metadata: GeneMetadata) -> ad.AnnData:
    """Join the cells of row groups, see :func:`read_dataset`; raises ValueError if there are none, or positions differ in kind."""
    if not parts:
        raise ValueError("the file has no cells")
    adata = ad.AnnData(
        sp.csr_matrix(sp.vstack([part.expression for part in parts], format="csr"), dtype=np.float32),
        obs=_obs(parts),
        var=pd.DataFrame(index=list(metadata.genes)),
    )
    positions = [part.position for part in parts if part.position is not None]
    if positions:
        if len(positions) < len(parts) or len({position.shape[1] for position in positions}) > 1:
            raise ValueError("only some row groups have positions, or their numbers of coordinates differ")
        adata.obsm[_keys.SPATIAL] = np.concatenate(positions)[:, : metadata.n_dims]
    return _mark_unmeasured(adata, metadata.unmeasured)


def _obs(parts: Sequence[Part]) -> pd.DataFrame:
    names = pd.Index(np.concatenate([part.names for part in parts]).astype(str))
    obs = pd.DataFrame(index=names)
    for key, columns in ((_keys.SLICE, [p.slices for p in parts]), (_keys.CELL_TYPE, [p.labels for p in parts])):
        filled = [
            np.full(len(part.names), None, dtype=object) if column is None else column
            for part, column in zip(parts, columns, strict=True)
        ]
        found = np.concatenate(filled)
        if not pd.isna(found).all():
            obs[key] = pd.Categorical(found)
    others = [part.others for part in parts if part.others is not None]
    if others:
        more = pd.concat(others, ignore_index=True)
        more.index = names
        obs = pd.concat([obs, more], axis=1)
    if not names.is_unique and _keys.SLICE in obs:
        logger.info("Names of cells are not unique; the name of the slice is appended.")
        slices = obs[_keys.SLICE].astype(object)
        obs.index = names + "-" + slices.where(slices.notna(), NO_SLICE).to_numpy()
    return obs


def _mark_unmeasured(adata: ad.AnnData, unmeasured: dict[str, tuple[str, ...]]) -> ad.AnnData:
    """Remove genes that no slice measures, and record in ``varm`` which slices measure the others."""
    if _keys.SLICE not in adata.obs or not unmeasured:
        return adata
    slices = list(adata.obs[_keys.SLICE].cat.categories)
    measured = pd.DataFrame(
        {name: ~adata.var_names.isin(unmeasured.get(name, ())) for name in slices}, index=adata.var_names
    )
    anywhere = measured.any(axis=1).to_numpy()
    if not anywhere.all():
        adata, measured = adata[:, anywhere].copy(), measured[anywhere]
    if not measured.to_numpy().all():
        adata.varm[_keys.MEASURED_IN] = measured
        for name in slices:
            lacking = list(measured.index[~measured[name]])
            if lacking:
                logger.warning(UNMEASURED, name, len(lacking), format_names(lacking))
    return adata
