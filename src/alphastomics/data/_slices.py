"""Slices and cell types of the cells of an AnnData."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphastomics._keys import SLICE
from alphastomics._labels import label_name, label_names
from alphastomics.data._checks import check_key

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

SINGLE_SLICE = "slice_0"
NO_SLICE = "unassigned"
USUAL_NAMES = (
    "sample",
    "sample_id",
    "section",
    "section_id",
    "slice",
    "slide",
    "batch",
    "library_id",
)  # of columns with sections


def resolve_slice_key(adata: AnnData, slice_key: str | None) -> str | None:
    """Key of slices in ``obs``: a given key must exist; None is ``"slice_id"`` if that exists."""
    if slice_key is not None:
        check_key("obs", adata.obs, slice_key, "slice_key")
        return slice_key
    if SLICE in adata.obs:
        logger.info('Slices are read from obs["%s"].', SLICE)
        return SLICE
    logger.info('obs["%s"] is missing and slice_key is None: all cells form one slice.', SLICE)
    named = [name for name in USUAL_NAMES if name in adata.obs and adata.obs[name].nunique() > 1]
    if named:
        logger.warning('If the values of obs["%s"] are sections, pass slice_key="%s".', named[0], named[0])
    return None


def resolve_query_slice_key(adata: AnnData, slice_key: str | None, *, positions: bool) -> str | None:
    """Key of slices in ``obs`` of a query.

    Dissociated cells have no slice and form one set. Cells with positions need a slice, because distances between
    slices are not defined.
    """
    if slice_key is not None and slice_key not in adata.obs and not positions:
        logger.info('obs["%s"] is missing: all cells form one set without a slice.', slice_key)
        return None
    return resolve_slice_key(adata, slice_key)


def slice_rows(adata: AnnData, slice_key: str | None, *, missing: bool = False) -> list[tuple[str, NDArray[np.int64]]]:
    """Name and ascending row numbers of every slice, sorted by name, for any type of the column.

    ``missing`` is whether cells may have no slice; they form one set, named ``"unassigned"``, which comes last.
    """
    everything = np.arange(adata.n_obs, dtype=np.int64)
    if slice_key is None:
        return [(SINGLE_SLICE, everything)]
    names = label_names(adata.obs[slice_key])
    absent = pd.isna(names)
    if absent.any() and not missing:
        raise ValueError(
            f'obs["{slice_key}"] is missing for {int(absent.sum())} cells; fill in their slice, or remove them.'
        )
    check_unassigned(names, slice_key)
    known = everything[~absent]
    if not len(known):
        return [(NO_SLICE, everything)] if len(everything) else []
    codes, unique = pd.factorize(names[~absent], sort=True)
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(1, len(unique)))
    groups = [(str(name), known[rows]) for name, rows in zip(unique, np.split(order, bounds), strict=True)]
    return groups + ([(NO_SLICE, everything[absent])] if absent.any() else [])


def check_unassigned(names: NDArray[np.object_], slice_key: str) -> None:
    """Raise an error for a slice that has the name of cells without a slice, if there are such cells."""
    n_absent = int(pd.isna(names).sum())
    if n_absent and (names == NO_SLICE).any():
        raise ValueError(
            f'obs["{slice_key}"] has a slice named "{NO_SLICE}", which is the name of the {n_absent} cells without a slice; '
            "rename it, or fill in the slice of these cells."
        )


def categories(adata: AnnData, key: str | None, argument: str) -> tuple[str, ...]:
    """Sorted values of a column of ``obs``; none without a key."""
    if key is None:
        return ()
    check_labels(adata, key, argument)
    return tuple(sorted({label_name(value) for value in adata.obs[key].dropna().unique()}))


def check_labels(adata: AnnData, key: str, argument: str) -> None:
    """Raise an error for a missing column of ``obs``, and for one of fractional numbers, which are no labels."""
    check_key("obs", adata.obs, key, argument)
    column = adata.obs[key]
    if pd.api.types.is_float_dtype(column) and (column.dropna() % 1 != 0).any():
        raise ValueError(f'obs["{key}"] has fractional numbers, not labels; pass {argument}=… of a column with labels')


def encode_labels(labels: pd.Series, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Number of each label in ``names``, from 1; 0 for missing labels and those that are not in ``names``."""
    found: NDArray[np.int64] = pd.Index(names, dtype=object).get_indexer(label_names(labels)).astype(np.int64)
    return found + 1
