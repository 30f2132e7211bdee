"""Further columns of a file, beside those of a dataset: their names in ``obs`` and in the file, and reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from alphastomics import _keys
from alphastomics.data.parquet._columns import CELL, EXPRESSION, INDICES, LABEL, LENGTH, POSITION, SIZE, SLICE, VALUES

if TYPE_CHECKING:
    import pandas as pd

RESERVED = frozenset({CELL, SLICE, LABEL, SIZE, POSITION, EXPRESSION, INDICES, VALUES, LENGTH})
RESTORED = RESERVED - {SLICE, LABEL} | {_keys.SD}
PREFIX = "obs_"  # of further columns with one of these names
KINDS = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_boolean,
    pa.types.is_string,
    pa.types.is_large_string,
)  # types of further columns


def column_name(key: str) -> str:
    """Column of the file for a further column of ``obs``, with a prefix if its name has another meaning."""
    return PREFIX + key if key in RESERVED or _without_prefixes(key) in RESTORED else key


def obs_key(name: str) -> str:
    """Invert :func:`column_name`, except for ``slice_id`` and ``cell_type``, which are taken in ``obs`` too."""
    return name.removeprefix(PREFIX) if _without_prefixes(name) in RESTORED else name


def _without_prefixes(name: str) -> str:
    while name.startswith(PREFIX):
        name = name.removeprefix(PREFIX)
    return name


def read_further(table: pa.Table) -> pd.DataFrame | None:
    """Further columns of numbers, booleans and strings; None without any."""
    columns, incomplete = {}, []
    for name in table.column_names:
        column = table.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if name not in RESERVED and any(is_kind(column.type) for is_kind in KINDS):
            key = obs_key(name)
            columns[key] = column
            if pa.types.is_boolean(column.type) and column.null_count:
                incomplete.append(key)
    # Booleans with missing values would be objects, which .h5ad files cannot hold.
    return pa.table(columns).to_pandas().astype(dict.fromkeys(incomplete, "boolean")) if columns else None
