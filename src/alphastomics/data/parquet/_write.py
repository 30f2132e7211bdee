"""Writing Parquet files: shards of a dataset, an AnnData as a single file with the same columns, embeddings."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp

from alphastomics import _keys
from alphastomics._io._atomic import replacing
from alphastomics._labels import label_names
from alphastomics.data._checks import check_genes, check_in_memory, expression_matrix, read_position
from alphastomics.data._matrix import canonical, row_sums
from alphastomics.data._slices import NO_SLICE, SINGLE_SLICE, check_unassigned
from alphastomics.data.parquet._columns import (
    CELL,
    DENSE,
    EXPRESSION,
    INDICES,
    N_AXES,
    POSITION,
    SLICE,
    VALUES,
    Cells,
    arrow_schema,
    to_arrow,
)
from alphastomics.data.parquet._dataset import GeneMetadata
from alphastomics.data.parquet._files import ROW_GROUP
from alphastomics.data.parquet._further import column_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from anndata import AnnData
    from numpy.typing import NDArray

EMBEDDING = "embedding"
OPTIONS: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
LARGEST_PAGE = 2**31 - 1  # bytes: a column chunk is one page


@contextmanager
def writing(path: Path, schema: pa.Schema, *, mapped: bool = False) -> Iterator[CellWriter]:
    """Write a file of cells atomically; with ``mapped``, expression is stored plain, else compressed (see ``_mapped.py``)."""
    options: dict[str, Any] = {
        **OPTIONS,
        "memory_pool": pa.system_memory_pool(),  # the default pool keeps the memory of a row group until the end
    }
    if mapped:
        plain = [f"{name}.list.element" for name in (EXPRESSION, INDICES, VALUES) if name in schema.names]
        others = [name for name in schema.names if name not in (EXPRESSION, INDICES, VALUES, POSITION)]
        options |= {
            "compression": dict.fromkeys([*others, f"{POSITION}.list.element"], "zstd") | dict.fromkeys(plain, "none"),
            "use_dictionary": others,
            "write_statistics": others,
            "data_page_size": LARGEST_PAGE,
        }
    with replacing(path, unique=True) as temporary, pq.ParquetWriter(temporary, schema, **options) as file:
        yield CellWriter(file, schema)


class CellWriter:
    """Writes row groups to an open file."""

    def __init__(self, file: pq.ParquetWriter, schema: pa.Schema) -> None:
        self._file, self._schema = file, schema

    def write(self, *parts: Cells) -> None:
        """Write cells of one slice as one row group, without a copy that joins the parts first."""
        table = pa.concat_tables([to_arrow(cells, self._schema) for cells in parts])
        self._file.write_table(table, row_group_size=len(table))


def write_parquet(
    adata: AnnData,
    path: str | PathLike[str],
    *,
    position_key: str = _keys.SPATIAL,
    slice_key: str | None = _keys.SLICE,
    cell_type_key: str | None = _keys.CELL_TYPE,
) -> None:
    """Write cells to a Parquet file with the columns of a dataset and the names of the genes in its metadata.

    Cells are sorted by draw (``obs["draw"]``, if it exists), then by slice; cells of one slice keep their order, and a row
    group holds cells of one slice. Further columns of ``obs`` keep their names, with the prefix ``obs_`` if a column of the
    dataset has the same name, which :func:`read_parquet` removes; ``layers["sd"]`` becomes the column ``sd``.

    Parameters
    ----------
    adata
        The cells, in memory.
    path
        The file; it is renamed to this path once it is complete.
    position_key
        Key of positions in ``obsm``, (n_cells, 2) or (n_cells, 3); NaN is written if it is missing.
    slice_key, cell_type_key
        Keys of slices and labels in ``obs``; one slice, and no labels, if they are missing or None.

    Raises
    ------
    KeyError
        If ``X`` is missing.
    ValueError
        If positions do not have two or three coordinates or are infinite, a column of ``obs`` holds values that Parquet has
        no type for, two columns would have the same name, or a slice is named ``"unassigned"`` as cells without a slice are.
    """
    check_in_memory(adata)
    path, genes = Path(path), check_genes(adata.var_names)
    x = canonical(expression_matrix(adata, None)).astype(np.float32)
    slices, labels = _names(adata, slice_key), _names(adata, cell_type_key)
    slices = np.full(adata.n_obs, SINGLE_SLICE, dtype=object) if slices is None else slices
    labels = np.full(adata.n_obs, None, dtype=object) if labels is None else labels
    check_unassigned(slices, str(slice_key))
    slices[pd.isna(slices)] = NO_SLICE
    position = _position(adata, position_key)
    extra = _further_columns(adata, {slice_key, cell_type_key})
    metadata = GeneMetadata(genes, _n_dims(adata, position_key), _unmeasured(adata))
    dense = x.nnz > DENSE * x.shape[0] * x.shape[1]
    schema = arrow_schema(len(genes), dense=dense).with_metadata(metadata.to_metadata())
    whole = pa.schema([*schema, *(pa.field(name, column.type) for name, column in extra.items())], schema.metadata)
    names, sizes = adata.obs_names.astype(str).to_numpy(dtype=object), row_sums(x)
    with replacing(path) as temporary, pq.ParquetWriter(temporary, whole, **OPTIONS) as file:
        for rows in _row_groups(adata, slices):
            cells = Cells(names[rows], slices[rows[0]], labels[rows], sizes[rows], position[rows], x[rows])
            columns = [column.take(pa.array(rows)) for column in extra.values()]
            table = pa.table([*to_arrow(cells, schema).columns, *columns], schema=whole)
            file.write_table(table, row_group_size=len(rows))


def write_embedding(adata: AnnData, latent: NDArray[np.float32], path: Path, *, slice_key: str | None) -> None:
    """Write embeddings (n_cells, width) with the columns ``cell_id``, ``slice_id`` where slices are known, ``embedding``."""
    columns = {CELL: pa.array(adata.obs_names.astype(str), pa.string())}
    slices = _names(adata, slice_key)
    if slices is not None:
        columns[SLICE] = pa.array(slices, pa.string())
    flat = pa.array(np.ascontiguousarray(latent, dtype=np.float32).ravel())
    columns[EMBEDDING] = pa.FixedSizeListArray.from_arrays(flat, latent.shape[1])
    with replacing(path) as temporary:
        pq.write_table(pa.table(columns), temporary, **OPTIONS)


def _names(adata: AnnData, key: str | None) -> NDArray[np.object_] | None:
    """Names of slices or labels in a column of ``obs``, None where one is missing; None without the column."""
    if key is None or key not in adata.obs:
        return None
    return label_names(adata.obs[key])


def _strings(values: pd.Series) -> NDArray[np.object_]:
    missing = values.isna().to_numpy()
    result = np.array([str(value) for value in values.astype(object)], dtype=object)
    result[missing] = None
    return result


def _position(adata: AnnData, key: str) -> NDArray[np.float64]:
    """Three coordinates of every cell: z = 0 in two dimensions, NaN without positions."""
    if key not in adata.obsm:
        return np.full((adata.n_obs, N_AXES), np.nan)
    found = read_position(adata, key, missing=True)
    position = np.zeros((adata.n_obs, N_AXES))
    position[:, : found.shape[1]] = found
    return position


def _n_dims(adata: AnnData, key: str) -> int:
    return int(adata.obsm[key].shape[1]) if key in adata.obsm else 2


def _unmeasured(adata: AnnData) -> dict[str, tuple[str, ...]]:
    """Slice -> genes that it does not measure, from ``varm`` as :func:`read_dataset` writes it."""
    measured = adata.varm.get(_keys.MEASURED_IN)
    if not isinstance(measured, pd.DataFrame):
        return {}
    return {name: tuple(measured.index[~measured[name]]) for name in measured if not measured[name].all()}


def _further_columns(adata: AnnData, written: set[str | None]) -> dict[str, pa.Array]:
    """Columns of ``obs`` that are not written yet, and the standard deviation of expression."""
    columns: dict[str, pa.Array] = {}
    for key in adata.obs:
        if key in written:
            continue
        values = adata.obs[key]
        if not (pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values)):
            values = pd.Series(_strings(values), dtype=object)
        try:
            column = pa.array(values.to_numpy(), from_pandas=True)
        except (pa.ArrowException, TypeError) as error:
            raise ValueError(f'obs["{key}"] cannot be written to Parquet ({error}); remove it') from error
        name = column_name(str(key))
        if name in columns:
            raise ValueError(f'obs["{key}"] and another column of obs would both be the column {name!r}; rename one')
        columns[name] = column
    if _keys.SD in adata.layers:
        sd = adata.layers[_keys.SD]
        flat = np.asarray(sd.toarray() if sp.issparse(sd) else sd, dtype=np.float32)
        columns[_keys.SD] = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
    return columns


def _row_groups(adata: AnnData, slices: NDArray[np.object_]) -> Iterator[NDArray[np.int64]]:
    """Rows of one draw and one slice, at most ``ROW_GROUP`` of them."""
    codes = pd.factorize(slices, sort=True)[0]
    drawn = adata.obs[_keys.DRAW] if _keys.DRAW in adata.obs else np.zeros(adata.n_obs)
    draws = pd.factorize(drawn, sort=True)[0]
    order = np.lexsort((codes, draws))
    ends = np.flatnonzero((np.diff(codes[order]) != 0) | (np.diff(draws[order]) != 0)) + 1
    for rows in np.split(order, ends):
        for start in range(0, len(rows), ROW_GROUP):
            yield rows[start : start + ROW_GROUP]
