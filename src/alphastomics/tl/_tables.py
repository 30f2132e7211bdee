"""Helpers of the scores of ``tl``: cells of each slice, permutations of the baselines, tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphastomics._keys import UNCERTAINTY_SUFFIX
from alphastomics.data._checks import check_key, check_text, check_type, numeric_position
from alphastomics.data._slices import check_labels, resolve_slice_key, slice_rows
from alphastomics.metrics._position import chance_order, oracle_order

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    Rows = dict[tuple[str, str], dict[str, float]]


def library_slices(adata: AnnData, library_key: str | None) -> list[tuple[str, NDArray[np.int64]]]:
    """Name and rows (n,) of each slice, sorted by name; cells without a slice form the last one."""
    if library_key is not None:
        check_key("obs", adata.obs, library_key, "library_key")
    return slice_rows(adata, resolve_slice_key(adata, library_key), missing=True)


def read_coordinates(adata: AnnData, key: str, argument: str) -> NDArray[np.float64]:
    """Read ``obsm[key]`` as float64, (n_cells, n_dims); ``argument`` sets the key, for errors."""
    check_type(adata)
    if key not in adata.obsm:
        found = ", ".join(map(repr, adata.obsm.keys())) or "nothing"
        remedy = "run alphastomics.tl.reconstruct(adata) first, or " if argument == "prediction" else ""
        raise KeyError(f'obsm["{key}"] is missing (found: {found}); {remedy}pass {argument}=…')
    return numeric_position(adata, key)


def read_uncertainty(adata: AnnData, prediction: str) -> NDArray[np.float64] | None:
    """Uncertainty (n_cells,) of ``obsm[prediction]``, if ``obs`` has one."""
    key = f"{prediction}{UNCERTAINTY_SUFFIX}"
    if key not in adata.obs:
        return None
    column = adata.obs[key]
    if not pd.api.types.is_numeric_dtype(column) or (column < 0).any() or np.isinf(column).any():
        raise ValueError(
            f'obs["{key}"] must hold finite distances that are not negative, or NaN; correct it, or delete it to leave out '
            "the scores of the uncertainty"
        )
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def obs_values(adata: AnnData, key: str | None, argument: str) -> NDArray[np.object_] | None:
    """A column of ``obs``, (n_cells,), or None without a key."""
    if key is None:
        return None
    check_key("obs", adata.obs, key, argument)
    return adata.obs[key].to_numpy(dtype=object)


def read_clusters(adata: AnnData, label_key: str, cluster_key: str) -> tuple[NDArray[np.object_], NDArray[np.object_]]:
    """Labels and clusters of all cells, (n_cells,) each."""
    for key, argument in ((label_key, "label_key"), (cluster_key, "cluster_key")):
        check_labels(adata, key, argument)
    return adata.obs[label_key].to_numpy(dtype=object), adata.obs[cluster_key].to_numpy(dtype=object)


def baseline_orders(n_cells: int, types: NDArray[np.object_] | None, random_state: int) -> dict[str, NDArray[np.int64]]:
    """Permutations (n_cells,) of :mod:`alphastomics.metrics` for ``chance`` and, if types are known, ``oracle``."""
    orders = {"chance": chance_order(n_cells, random_state)}
    if types is not None:
        orders["oracle"] = oracle_order(n_cells, types, random_state)
    return orders


def as_table(rows: Rows, level: str, *, keep: bool) -> pd.DataFrame:
    """A table by slice and kind; the second level of the index is named ``level`` and dropped unless ``keep``."""
    if not rows:
        raise ValueError("no cell can be scored: there are no cells, or all positions are NaN")
    index = pd.MultiIndex.from_tuples(rows, names=["slice", level])
    table = pd.DataFrame(list(rows.values()), index=index)
    return table if keep else table.droplevel(level)


def store(adata: AnnData, key: str, table: pd.DataFrame, *, copy: bool) -> pd.DataFrame | None:
    """Return the table, or write it to ``uns[key]``, further index levels as columns, which files can store."""
    if copy:
        return table
    check_text(key, "key_added", "uns")
    adata.uns[key] = table.reset_index(level=list(range(1, table.index.nlevels))) if table.index.nlevels > 1 else table
    return None
