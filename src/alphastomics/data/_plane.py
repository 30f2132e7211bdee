"""Planar positions with three columns: the column that is constant is left out of the model and restored in its results."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anndata import AnnData
    from numpy.typing import ArrayLike, NDArray

    from alphastomics.data._schema import TissueSchema

    Slice = tuple[str, NDArray[np.int64], NDArray[np.float64] | None]  # a SliceCells: name, rows, positions

logger = logging.getLogger(__name__)

TOLERANCE = 1e-6  # of the extent of the cells: smaller differences are rounding errors


def constant_column(bounds: NDArray[np.float64]) -> int | None:
    """Last of three coordinates that is constant in each of S sets of cells, by their least and largest values (S, 2, D)."""
    ranges = bounds[:, 1] - bounds[:, 0]
    constant = (ranges <= TOLERANCE * ranges.max(axis=1, keepdims=True)).all(axis=0)
    if len(constant) != 3 or not constant.any() or constant.all():
        return None
    return int(np.flatnonzero(constant)[-1])


def find_plane(
    groups: Iterable[tuple[str, NDArray[np.float64]]], frame: str, position_key: str
) -> tuple[int, float] | None:
    """The constant column and its value in the first slice, logged; None if there is none.

    ``groups`` are the names and positions (n, D) of the reference slices. The column is constant within each slice, or
    in a shared frame over all of them.
    """
    names, bounds = zip(*((name, find_bounds(points)) for name, points in groups), strict=True)
    of_slices = np.stack(bounds)
    of_all = np.stack([of_slices[:, 0].min(axis=0), of_slices[:, 1].max(axis=0)])[None]
    column = constant_column(of_all if frame == "shared" else of_slices)
    if column is None:
        return None
    value = float(of_slices[0, 0, column])
    if constant_column(of_all) == column:
        logger.info(
            'obsm["%s"][:, %d] is constant (%g): cells are placed in 2D, and this column is kept.',
            position_key, column, value,
        )  # fmt: skip
    else:
        logger.info(
            'obsm["%s"][:, %d] is constant within each slice: cells are placed in 2D, and this column is %g, as in slice %r.',
            position_key, column, value, names[0],
        )  # fmt: skip
    return column, value


def find_bounds(position: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least and the largest value of each coordinate (2, D)."""
    return np.stack([position.min(axis=0), position.max(axis=0)])


def leave_out_column(position: NDArray[np.float64], schema: TissueSchema, slice_name: str) -> NDArray[np.float64]:
    """Positions (n, D) of a slice without the column that is constant in the reference, which may be missing already.

    A cell with NaN in this column has no position.
    """
    if schema.plane is None or position.shape[1] == schema.n_dims:
        return position
    column, unknown = schema.plane[0], np.isnan(position).any(axis=1)
    if not unknown.all():
        ranges = np.ptp(position[~unknown], axis=0)
        if ranges[column] > TOLERANCE * ranges.max():
            raise ValueError(
                f'obsm["{schema.position_key}"][:, {column}] differs between the cells of slice {slice_name!r}, but is constant in '
                "the slices of the reference, so that positions are 2D; pass each section as a slice, or the other two columns."
            )
    planar = np.delete(position, column, axis=1)
    planar[unknown] = np.nan
    return planar


def insert_column(
    position: ArrayLike, schema: TissueSchema, values: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Positions (..., n, D) with the column that was left out: ``values`` (n,), or the constant of the reference."""
    position = np.asarray(position, dtype=np.float64)
    if schema.plane is None:
        return position
    column, constant = schema.plane
    unknown = np.isnan(position).any(axis=-1)
    return np.insert(position, column, np.where(unknown, np.nan, constant if values is None else values), axis=-1)


def restore_column(
    position: NDArray[np.float64], query: AnnData, slices: Iterable[Slice], schema: TissueSchema
) -> NDArray[np.float64]:
    """Sampled positions (K, n, D) of a query with the column that was left out.

    Known positions keep their own values, which the other cells of their slice share; all others have the constant of the
    reference.
    """
    if schema.plane is None:
        return position
    column, constant = schema.plane
    values, own = np.full(query.n_obs, constant), query.obsm.get(schema.position_key)
    if own is None or own.shape[1] == schema.n_dims:
        return insert_column(position, schema, values)
    own = np.asarray(own, dtype=np.float64)
    for _, rows, read in slices:
        known = rows[:0] if read is None else rows[np.isfinite(read).all(axis=1)]
        if len(known):
            values[rows] = own[known[0], column]
            values[known] = own[known, column]
    return insert_column(position, schema, values)
