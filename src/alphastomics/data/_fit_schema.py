"""Fit a schema to the reference cells of an AnnData."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.spatial import KDTree

from alphastomics.config import SetupConfig
from alphastomics.config._setting import check_names
from alphastomics.data._checks import (
    check_choice,
    check_genes,
    check_in_memory,
    check_slice,
    read_expression,
    read_position,
    read_sequence,
)
from alphastomics.data._matrix import Matrix, Moments, canonical, row_blocks, row_sums
from alphastomics.data._plane import find_plane
from alphastomics.data._schema import TissueSchema
from alphastomics.data._slices import categories, resolve_slice_key, slice_rows
from alphastomics.data._tiles import n_tiles
from alphastomics.data._values import log_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data._schema import ResolvedTransform
    from alphastomics.data._values import ValueKind

logger = logging.getLogger(__name__)

_SCALE_FLOOR = 0.1  # of standard deviations, relative to their median
_ROUNDING = 1e-6  # of a standard deviation, relative to the mean
_RADIUS_RATIO = 5.0  # of the largest slice to the smallest, above which a warning is issued


def fit_schema(adata: AnnData, **setup: Any) -> TissueSchema:
    """Fit the schema of a tissue to its reference cells.

    The matrix is read in blocks of rows; moments are float64 and have the same bits for CSR, CSC, dense, integer and
    float storage. `adata` is not modified.

    Parameters
    ----------
    adata
        The reference, in memory.
    **setup
        Fields of :class:`~alphastomics.config.SetupConfig`. The slices and the kind of the values are logged.

    Returns
    -------
    The schema.

    Raises
    ------
    KeyError
        If a named key is missing.
    TypeError
        If an argument is unknown.
    ValueError
        If values, positions or slices are invalid; the message names them and a remedy.

    Warns
    -----
    UserWarning
        If the radii of the slices differ more than fivefold, or slices adjoin each other as fields of view do.
    """
    check_in_memory(adata)
    check_names(setup, SetupConfig)
    setup = vars(SetupConfig()) | setup
    frame, position_key, sequence_key = setup["frame"], setup["position_key"], setup["sequence_key"]
    check_choice("frame", frame, ("slice", "shared"))
    genes = check_genes(adata.var_names)
    position = read_position(adata, position_key, missing=False)
    slice_key = resolve_slice_key(adata, setup["slice_key"])
    cell_types = categories(adata, setup["cell_type_key"], "cell_type_key")
    if sequence_key is not None:
        read_sequence(adata, sequence_key)
    if not adata.n_obs:
        raise ValueError(
            f'no cell of the reference has a position in obsm["{position_key}"]; pass cells with positions.'
        )
    groups = [(name, position[rows]) for name, rows in slice_rows(adata, slice_key)]
    plane = find_plane(groups, frame, position_key)
    if plane is not None:
        groups = [(name, np.delete(points, plane[0], axis=1)) for name, points in groups]
    extents = {name: measure_extent(name, points) for name, points in groups}
    scale, center = fit_frame(extents, frame)
    if slice_key is not None and frame == "slice":
        _check_tiles([points for _, points in groups], fit_spacing(extents), slice_key)
    matrix, chosen, values = read_expression(adata, setup["layer"], setup["transform"])
    log_kind("the reference", values, chosen)
    _recommend_counts(adata, setup["layer"], values.kind)
    library_size, share, mean, gene_scale = _fit_expression(matrix, chosen)
    logger.info("%d reference cells, %d genes (%s), %d slices", adata.n_obs, len(genes), chosen, len(extents))
    return TissueSchema(
        genes=genes,
        library_size=library_size,
        gene_mean=tuple(mean.tolist()),
        gene_scale=tuple(gene_scale.tolist()),
        gene_share=tuple(share.tolist()),
        n_dims=groups[0][1].shape[1],
        scale=scale,
        spacing=fit_spacing(extents),
        center=center,
        slices=tuple(extents),
        cell_types=cell_types,
        value_kind=values.kind,
        plane=plane,
        **(setup | {"slice_key": slice_key, "transform": chosen}),
    )


def _recommend_counts(adata: AnnData, layer: str | None, kind: ValueKind) -> None:
    """Log where counts are or how they are restored, if other values were chosen that may be transformed counts."""
    layers = [name for name in adata.layers if name != layer and "counts" in str(name)]  # X is None in anndata 0.13
    if kind in ("counts", "binary") or not (layers or kind == "log-normalized"):
        return
    logger.warning(
        "Placement is more accurate from counts than from %s values; %s.",
        kind,
        f'pass layer="{layers[0]}" if it holds the counts'
        if layers
        else "pass layer=… if a layer holds the counts, or restore them with alphastomics.pp.restore_counts",
    )


def _check_tiles(slices: Sequence[NDArray[np.float64]], spacing: float, slice_key: str) -> None:
    """Warn if most slices adjoin each other, as fields of view do."""
    n = n_tiles(slices, spacing)
    if 2 * n > len(slices):
        warnings.warn(
            f'{n} of the {len(slices)} slices of obs["{slice_key}"] adjoin others without overlapping, as fields of view of one section do. '
            "A slice is a section with a frame of its own; pass slice_key=… with the section of each cell.",
            UserWarning,
            stacklevel=3,
        )


class Extent(NamedTuple):
    """Number of cells of a slice, their mean (D,), and lengths in user units.

    ``radius`` is the root mean square distance from the mean; ``spacing`` the median distance to the nearest cell at
    another position.
    """

    n_cells: int
    center: NDArray[np.float64]
    radius: float
    spacing: float


def measure_extent(name: str, points: NDArray[np.float64]) -> Extent:
    """Measure a slice by the positions (N, D) of its reference cells; raises ValueError if it has no extent."""
    check_slice(name, points)
    at_origin = int((points == 0).all(axis=1).sum())
    if at_origin > 1:
        warnings.warn(
            f"{at_origin} cells of slice {name!r} are at the origin; mark unknown positions with NaN, not with 0.",
            UserWarning,
            stacklevel=4,
        )
    center = points.mean(axis=0)
    radius = float(np.sqrt(((points - center) ** 2).sum(axis=1).mean()))
    nearest = KDTree(points).query(points, 2)[0][:, 1]
    if not nearest.all():
        distinct = np.unique(points, axis=0)  # at least two, as check_slice ensures
        nearest = KDTree(distinct).query(distinct, 2)[0][:, 1]
    return Extent(len(points), center, radius, float(np.median(nearest)))


def fit_frame(extents: Mapping[str, Extent], frame: str) -> tuple[float, tuple[float, ...]]:
    """Scale and center; see `TissueSchema`."""
    n_dims = len(next(iter(extents.values())).center)
    if frame == "shared":
        return _fit_shared(list(extents.values()), n_dims)
    radii = {name: extent.radius for name, extent in extents.items()}
    small, large = min(radii, key=radii.__getitem__), max(radii, key=radii.__getitem__)
    if radii[large] > _RADIUS_RATIO * radii[small]:
        warnings.warn(
            f"The RMS radii of the slices differ {radii[large] / radii[small]:.3g}-fold, from {radii[small]:.4g} "
            f"({small!r}) to {radii[large]:.4g} ({large!r}), but all share one scale; check that all positions have "
            "the same units.",
            UserWarning,
            stacklevel=3,
        )
    return float(np.median(list(radii.values())) / np.sqrt(n_dims)), (0.0,) * n_dims


def _fit_shared(extents: Sequence[Extent], n_dims: int) -> tuple[float, tuple[float, ...]]:
    """Scale and center of all cells together, whose variance is the sum of that within slices and that between them."""
    n_cells = np.array([extent.n_cells for extent in extents])
    centers = np.stack([extent.center for extent in extents])
    center = n_cells @ centers / n_cells.sum()
    squares = np.array([extent.radius for extent in extents]) ** 2 + ((centers - center) ** 2).sum(axis=1)
    return float(np.sqrt(n_cells @ squares / n_cells.sum() / n_dims)), tuple(center.tolist())


def fit_spacing(extents: Mapping[str, Extent]) -> float:
    """Distance between neighboring cells; see `TissueSchema`."""
    return float(np.median([extent.spacing for extent in extents.values()]))


def _fit_expression(
    matrix: Matrix, transform: ResolvedTransform
) -> tuple[float | None, NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Median library size, share, mean and floored standard deviation of the genes over the reference cells."""
    n_cells, n_genes = matrix.shape
    cells, moments = np.arange(n_cells), Moments(n_genes)
    if transform == "none":
        for rows in row_blocks(cells, n_genes):
            moments.add(canonical(matrix[rows]))
        _check_variation(moments)
        return None, np.empty(0), moments.mean, floor_scale(moments.sd)
    sizes, totals = _depth(matrix, cells)
    library_size = float(np.median(sizes[sizes > 0]))
    for rows in row_blocks(cells, n_genes):
        block, size = canonical(matrix[rows]), sizes[rows]
        factor = np.divide(library_size, size, out=np.ones(len(rows)), where=size > 0)
        block.data = np.log1p(block.data * np.repeat(factor, np.diff(block.indptr)))
        moments.add(block)
    _check_variation(moments)
    return library_size, totals / totals.sum(), moments.mean, floor_scale(moments.sd)


def _depth(matrix: Matrix, cells: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Library sizes of the reference cells and totals of the genes."""
    sizes, totals = [], np.zeros(matrix.shape[1])
    for rows in row_blocks(cells, matrix.shape[1]):
        block = canonical(matrix[rows])
        sizes.append(row_sums(block))
        totals += np.bincount(block.indices, weights=block.data, minlength=matrix.shape[1])
    if not totals.any():
        raise ValueError("all expression values of the reference are zero; check layer=…")
    return np.concatenate(sizes), totals


def _check_variation(moments: Moments) -> None:
    """Raise an error if all cells have the same expression, up to rounding errors."""
    if not (moments.sd > _ROUNDING * np.abs(moments.mean)).any():
        raise ValueError("no gene varies between the cells of the reference; check X or layer=…, and pass other cells")


def floor_scale(sd: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard deviations, at least a tenth of the median over the genes that vary."""
    varying = sd[sd > 0]
    return np.maximum(sd, _SCALE_FLOOR * np.median(varying) if len(varying) else 1.0)
