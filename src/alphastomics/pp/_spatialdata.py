"""Conversion between AnnData and SpatialData."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.spatial import KDTree

from alphastomics._keys import INSTANCE, SLICE, SPATIAL
from alphastomics._labels import label_names
from alphastomics.data._checks import check_key, check_type, read_position
from alphastomics.data._slices import SINGLE_SLICE, resolve_slice_key, slice_rows

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray
    from spatialdata import SpatialData

logger = logging.getLogger(__name__)

ATTRS = "spatialdata_attrs"  # key of ``uns``: region and instance keys of a table
AXES = ("x", "y", "z")


def from_spatialdata(
    sdata: SpatialData,
    *,
    table: str | None = None,
    coordinate_system: str = "global",
    position_key: str = SPATIAL,
    slice_key: str = SLICE,
) -> AnnData:
    """Convert a table of a SpatialData to an AnnData with positions and slices.

    The position of a cell is the centroid of the shape, label or point that its row of the table annotates, transformed to
    one coordinate system. Every region (element) is a slice.

    Parameters
    ----------
    sdata
        A SpatialData with a table that annotates shapes, labels or points, in 2D or 3D.
    table
        Name of the table. May be None if there is only one.
    coordinate_system
        Coordinate system of the positions, which are in its units. Every region must have a transformation to it.
    position_key
        Key of ``obsm`` for the positions. An existing entry is replaced.
    slice_key
        Column of ``obs`` for the slices. An existing column is kept, so that a region may contain several slices.

    Returns
    -------
    A copy of the table with

    - ``obsm[position_key]``: positions in float64, (n_cells, 2 or 3), NaN for cells without an instance in their region;
    - ``obs[slice_key]``: slice of each cell (categorical).

    Region and instance columns and ``uns["spatialdata_attrs"]`` are kept, so the result can be used as a table again.

    Raises
    ------
    ImportError
        If the package spatialdata is not installed.
    KeyError
        If a table, a region, a column or the coordinate system is missing.
    ValueError
        If the table annotates no element, or none of its instances is in the region.

    Examples
    --------
    >>> reference = asx.pp.from_spatialdata(sdata)
    >>> asx.tl.reconstruct(query, reference)
    """
    _require_spatialdata()
    if not hasattr(sdata, "tables"):
        raise TypeError(
            f"sdata is of the class {type(sdata).__name__}, not SpatialData; pass a SpatialData, or use an AnnData as it is"
        )
    adata = sdata.tables[_table_name(sdata, table)].copy()
    if ATTRS not in adata.uns:
        raise ValueError(
            "the table annotates no element, so its cells have no positions; use sdata.tables[…] without conversion"
        )
    region_key, instance_key = (adata.uns[ATTRS][name] for name in ("region_key", "instance_key"))
    cells = adata.obs.groupby(region_key, observed=True).indices
    centroids = {
        region: _read_centroids(sdata, region, adata.obs[instance_key].iloc[rows], coordinate_system)
        for region, rows in cells.items()
    }
    dims = {points.shape[1] for points in centroids.values()}
    if len(dims) != 1:
        raise ValueError(
            f"regions of table=… have {sorted(dims)} dimensions; convert tables with regions of equal dimension"
        )
    position = np.full((adata.n_obs, dims.pop()), np.nan)
    for region, rows in cells.items():
        position[rows] = centroids[region]
    adata.obsm[position_key] = position
    if slice_key not in adata.obs:
        adata.obs[slice_key] = adata.obs[region_key].cat.remove_unused_categories()
    elif slice_key != region_key:
        logger.info('The existing column obs["%s"] is kept as slices.', slice_key)
    return adata


def to_spatialdata(
    adata: AnnData,
    *,
    table: str = "table",
    coordinate_system: str = "global",
    position_key: str = SPATIAL,
    slice_key: str | None = None,
    instance_key: str | None = None,
    radius: float | None = None,
) -> SpatialData:
    """Convert an AnnData with positions to a SpatialData with one element per slice and a table.

    Elements are circles (2D) or points (3D), one per cell.

    Parameters
    ----------
    adata
        Cells with positions.
    table
        Name of the table.
    coordinate_system
        Name of the coordinate system of the positions.
    position_key
        Key of ``obsm`` with the positions, (n_cells, 2 or 3), for example ``"spatial_reconstructed"``. Cells whose position
        is NaN are only in the table.
    slice_key
        Column of ``obs`` with the slice of each cell. By default ``"slice_id"``; without such a column all cells form one
        slice. Slice names become element names and may contain letters, digits, ``_``, ``-`` and ``.`` only.
    instance_key
        Column of ``obs`` with an identifier of each cell that is unique in its slice. By default that of
        ``uns["spatialdata_attrs"]``, otherwise ``"instance_id"``. A missing column is filled with consecutive numbers.
    radius
        Radius of the circles in the units of the positions. By default half the median distance of nearest neighbors in the
        slice.

    Returns
    -------
    The SpatialData. `adata` is not modified.

    Raises
    ------
    ImportError
        If the package spatialdata is not installed.
    KeyError
        If a key is missing.
    ValueError
        If a slice has no cell with a position, or slice names, identifiers or `radius` are invalid.

    Examples
    --------
    >>> sdata = asx.pp.to_spatialdata(adata, position_key="spatial_reconstructed")
    >>> sdata.write("tissue.zarr")
    """
    _require_spatialdata()
    from spatialdata import SpatialData
    from spatialdata.models import TableModel

    check_type(adata)
    if radius is not None and not radius > 0:
        raise ValueError(f"radius={radius} must be positive; leave it out for half the distance of neighbors")
    position = read_position(adata, position_key, missing=True)
    slice_key = resolve_slice_key(adata, slice_key)
    slices = sorted(
        slice_rows(adata, slice_key), key=lambda each: each[1][0]
    )  # squidpy requires the order of the table
    if table in dict(slices):
        raise ValueError(f"a slice has the name of the table, {table!r}; pass another table=…")
    cells = adata.copy()
    region_key = slice_key or SLICE
    cells.obs[region_key] = SINGLE_SLICE if slice_key is None else label_names(cells.obs[slice_key])
    cells.obs[region_key] = cells.obs[region_key].astype("category")
    instance_key = instance_key or adata.uns.get(ATTRS, {}).get("instance_key", INSTANCE)
    if instance_key not in cells.obs:
        cells.obs[instance_key] = np.arange(adata.n_obs)
    if cells.obs.duplicated([region_key, instance_key]).any():
        raise ValueError(f'obs["{instance_key}"] is not unique within slices; pass instance_key=…')
    elements: dict[str, Any] = {}
    for name, rows in slices:
        rows = rows[np.isfinite(position[rows]).all(axis=1)]
        if not len(rows):
            raise ValueError(
                f"slice {name!r} has no cell with a position; predict positions with tl.reconstruct, or remove the slice"
            )
        index = pd.Index(cells.obs[instance_key].iloc[rows])
        elements[name] = _element(position[rows], index, coordinate_system, radius)
    sdata = SpatialData.init_from_elements(elements)
    sdata.tables[table] = TableModel.parse(
        cells, region=list(elements), region_key=region_key, instance_key=instance_key, overwrite_metadata=True
    )
    return sdata


def _require_spatialdata() -> None:
    try:
        import spatialdata  # noqa: F401
    except ImportError as error:
        raise ImportError("spatialdata is not installed; run pip install 'alphastomics[spatialdata]'") from error


def _table_name(sdata: SpatialData, table: str | None) -> str:
    names = list(sdata.tables)
    if table is not None:
        check_key("tables", sdata.tables, table, "table")
        return table
    if len(names) != 1:
        raise KeyError(f"the SpatialData has {len(names)} tables ({', '.join(names)}); pass table=…")
    return names[0]


def _read_centroids(
    sdata: SpatialData, region: str, instances: pd.Series, coordinate_system: str
) -> NDArray[np.float64]:
    """Centroids of instances, (n, 2 or 3), NaN for instances that are not in the region."""
    from spatialdata import get_centroids
    from spatialdata.transformations import get_transformation

    if region not in sdata:
        raise KeyError(f"region {region!r} of the table is not in the SpatialData; add it, or remove its cells")
    systems = get_transformation(sdata[region], get_all=True)
    if coordinate_system not in systems:
        raise KeyError(
            f"{region!r} has no transformation to {coordinate_system!r} (found: {', '.join(map(repr, systems))}); "
            "pass coordinate_system=…"
        )
    with warnings.catch_warnings():  # rows are looked up by index, in any order
        warnings.filterwarnings("ignore", message="The index of the dataframe is not monotonic")
        centroids = get_centroids(sdata[region], coordinate_system=coordinate_system).compute()
    axes = [axis for axis in AXES if axis in centroids]
    if not centroids.index.is_unique:
        raise ValueError(f"instances of region {region!r} are not unique; correct the index of the element")
    rows = centroids.index.get_indexer(np.asarray(instances))
    if (rows < 0).all():
        raise ValueError(
            f'no instance of region {region!r} is in obs["{instances.name}"] of the table (region: '
            f"{centroids.index.tolist()[0]!r}, …; table: {instances.tolist()[0]!r}, …); correct one of them"
        )
    if (rows < 0).any():
        logger.info(
            "%d of %d cells have no instance in region %r; their position is NaN.", (rows < 0).sum(), len(rows), region
        )
    position: NDArray[np.float64] = centroids[axes].to_numpy(dtype=np.float64)[rows]
    position[rows < 0] = np.nan
    return position


def _element(position: NDArray[np.float64], index: pd.Index, coordinate_system: str, radius: float | None) -> Any:
    """Circles in 2D, points in 3D, where SpatialData has no circles."""
    from spatialdata.models import PointsModel, ShapesModel
    from spatialdata.transformations import Identity

    system = {coordinate_system: Identity()}
    if position.shape[1] == len(AXES):
        points = pd.DataFrame(position, columns=list(AXES), index=index).sort_index()
        return PointsModel.parse(points, transformations=system)
    radius = _half_spacing(position) if radius is None else radius
    return ShapesModel.parse(position, geometry=0, radius=radius, index=index, transformations=system)


def _half_spacing(position: NDArray[np.float64]) -> float:
    """Half the median distance to the nearest neighbor; 1 for a single cell or a distance of 0."""
    if len(position) < 2:
        return 1.0
    distance, _ = KDTree(position).query(position, k=2)
    return float(np.median(distance[:, 1])) / 2 or 1.0
