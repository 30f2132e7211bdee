"""SpatialData in and out: the cells of a table, at the places of the elements that the table annotates."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from scipy.spatial import KDTree

from alphastomics._keys import INSTANCE, SLICE, SPATIAL
from alphastomics.data._checks import check_key, read_position
from alphastomics.data._slices import SINGLE_SLICE, resolve_slice_key, slice_rows

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray
    from spatialdata import SpatialData

logger = logging.getLogger(__name__)

ATTRS = "spatialdata_attrs"  # ``uns``: what a table annotates
AXES = ("x", "y", "z")


def from_spatialdata(
    sdata: SpatialData,
    *,
    table: str | None = None,
    coordinate_system: str = "global",
    position_key: str = SPATIAL,
    slice_key: str = SLICE,
) -> AnnData:
    """Take the cells of a SpatialData as an AnnData with positions and slices.

    A cell is a row of a table; its position is the centroid of the shape, the label or the point that the row
    annotates, brought into one coordinate system. Every region (element) is a slice.

    Parameters
    ----------
    sdata
        A SpatialData with a table that annotates shapes, labels or points, in 2D or 3D.
    table
        Name of the table; the only one when None.
    coordinate_system
        Where positions are wanted, in its units. Every region must have a transformation to it.
    position_key
        Where positions go in ``obsm``; what is there is replaced.
    slice_key
        Where the region of a cell goes in ``obs``; a column of that name is kept as it is, so that one region may hold
        several slices.

    Returns
    -------
    A copy of the table with ``obsm[position_key]``, float64 of shape (n_cells, 2 or 3), NaN for cells without an
    instance in their region, and ``obs[slice_key]``, categorical. Region, instance and ``uns["spatialdata_attrs"]``
    stay: the result may be put back as a table.

    Raises
    ------
    ImportError
        If the package spatialdata is not installed.
    KeyError
        If a table, a region, a column or the coordinate system is missing.
    ValueError
        If the table annotates nothing, or its instances are not those of a region.

    Examples
    --------
    >>> adata = asx.pp.from_spatialdata(sdata)
    >>> asx.tl.reconstruct(adata)
    """
    _require_spatialdata()
    adata = sdata.tables[_table_name(sdata, table)].copy()
    if ATTRS not in adata.uns:
        raise ValueError(
            "The table annotates no element, so its cells have no place; take it as it is: sdata.tables[…]"
        )
    region_key, instance_key = (adata.uns[ATTRS][name] for name in ("region_key", "instance_key"))
    cells = adata.obs.groupby(region_key, observed=True).indices
    places = {
        region: _places(sdata, region, adata.obs[instance_key].iloc[rows], coordinate_system)
        for region, rows in cells.items()
    }
    dims = {points.shape[1] for points in places.values()}
    if len(dims) != 1:
        raise ValueError(f"Regions of one table must have the same number of dimensions, found {sorted(dims)}")
    position = np.empty((adata.n_obs, dims.pop()))
    for region, rows in cells.items():
        position[rows] = places[region]
    adata.obsm[position_key] = position
    if slice_key not in adata.obs:
        adata.obs[slice_key] = adata.obs[region_key].cat.remove_unused_categories()
    elif slice_key != region_key:
        logger.info('Slices stay as they are in obs["%s"], which is there already.', slice_key)
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
    """Make a SpatialData of cells with positions: one element for every slice, and a table that annotates them.

    Parameters
    ----------
    adata
        The cells. It is not modified.
    table
        Name of the table.
    coordinate_system
        The coordinate system in which the positions are, in their units.
    position_key
        Where positions are in ``obsm``, shape (n_cells, 2) or (n_cells, 3); for placed cells
        ``"spatial_reconstructed"``. A cell with NaN there is in the table alone.
    slice_key
        Where the slice of a cell is in ``obs``; ``"slice_id"`` if it is there when None, else all cells are one slice.
        Names of slices become names of elements: letters, digits, ``_``, ``-`` and ``.`` only.
    instance_key
        Where the identifier of a cell is in ``obs``, unique in its slice. None takes that of
        ``uns["spatialdata_attrs"]`` if it is there, else ``"instance_id"``; a column that is missing is numbered.
    radius
        Radius of the circles, in the units of the positions; half the median distance between nearest cells of the
        slice when None.

    Returns
    -------
    A SpatialData with a circle for every cell in 2D, a point in 3D.

    Raises
    ------
    ImportError
        If the package spatialdata is not installed.
    KeyError
        If a key is missing.
    ValueError
        If a slice has no cell with a position, or names or identifiers cannot be used.

    Examples
    --------
    >>> sdata = asx.pp.to_spatialdata(adata, position_key="spatial_reconstructed")
    >>> sdata.write("tissue.zarr")
    """
    _require_spatialdata()
    from spatialdata import SpatialData
    from spatialdata.models import TableModel

    position = read_position(adata, position_key, missing=True)
    slice_key = resolve_slice_key(adata, slice_key)
    slices = sorted(slice_rows(adata, slice_key), key=lambda each: each[1][0])  # squidpy wants the order of the table
    if table in dict(slices):
        raise ValueError(f"A slice is named {table!r}, as is the table; pass table=…")
    cells = adata.copy()
    region_key = slice_key or SLICE
    cells.obs[region_key] = SINGLE_SLICE if slice_key is None else cells.obs[slice_key].astype(str)
    cells.obs[region_key] = cells.obs[region_key].astype("category")
    instance_key = instance_key or adata.uns.get(ATTRS, {}).get("instance_key", INSTANCE)
    if instance_key not in cells.obs:
        cells.obs[instance_key] = np.arange(adata.n_obs)
    if cells.obs.duplicated([region_key, instance_key]).any():
        raise ValueError(f'obs["{instance_key}"] repeats itself within a slice; pass instance_key=…')
    elements: dict[str, Any] = {}
    for name, rows in slices:
        rows = rows[np.isfinite(position[rows]).all(axis=1)]
        if not len(rows):
            raise ValueError(
                f"Slice {name!r} has no cell with a position; place them with tl.reconstruct, or remove it"
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
        raise ImportError("SpatialData needs a package more: pip install 'alphastomics[spatialdata]'") from error


def _table_name(sdata: SpatialData, table: str | None) -> str:
    names = list(sdata.tables)
    if table is not None:
        check_key("tables", sdata.tables, table, "table")
        return table
    if len(names) != 1:
        raise KeyError(f"The SpatialData has {len(names)} tables ({', '.join(names)}); pass table=… to name one")
    return names[0]


def _places(sdata: SpatialData, region: str, instances: pd.Series, coordinate_system: str) -> NDArray[np.float64]:
    """Centroids of instances, shape (n, 2 or 3); NaN where the region does not have the instance."""
    from spatialdata import get_centroids
    from spatialdata.transformations import get_transformation

    if region not in sdata:
        raise KeyError(f"The table annotates {region!r}, which is not in the SpatialData; add it, or remove its cells")
    systems = get_transformation(sdata[region], get_all=True)
    if coordinate_system not in systems:
        raise KeyError(
            f"{region!r} has no transformation to {coordinate_system!r} (found: {', '.join(map(repr, systems))}); "
            "pass coordinate_system=…"
        )
    with warnings.catch_warnings():  # rows are found by their index, in whatever order they are
        warnings.filterwarnings("ignore", message="The index of the dataframe is not monotonic")
        centroids = get_centroids(sdata[region], coordinate_system=coordinate_system).compute()
    axes = [axis for axis in AXES if axis in centroids]
    if not centroids.index.is_unique:
        raise ValueError(f"Instances of {region!r} occur more than once; the table cannot say which it means")
    rows = centroids.index.get_indexer(np.asarray(instances))
    if (rows < 0).all():
        raise ValueError(
            f'No instance of {region!r} is one of obs["{instances.name}"] of the table (there '
            f"{centroids.index.tolist()[0]!r}, here {instances.tolist()[0]!r}, …); correct the column or the index of the element"
        )
    if (rows < 0).any():
        logger.info(
            "%d of %d cells have no instance in %r: their position is NaN.", (rows < 0).sum(), len(rows), region
        )
    places: NDArray[np.float64] = centroids[axes].to_numpy(dtype=np.float64)[rows]
    places[rows < 0] = np.nan
    return places


def _element(position: NDArray[np.float64], index: pd.Index, coordinate_system: str, radius: float | None) -> Any:
    """Circles in the plane; in space, where SpatialData has none, points."""
    from spatialdata.models import PointsModel, ShapesModel
    from spatialdata.transformations import Identity

    system = {coordinate_system: Identity()}
    if position.shape[1] == len(AXES):
        points = pd.DataFrame(position, columns=list(AXES), index=index).sort_index()
        return PointsModel.parse(points, transformations=system)
    radius = _half_spacing(position) if radius is None else radius
    return ShapesModel.parse(position, geometry=0, radius=radius, index=index, transformations=system)


def _half_spacing(position: NDArray[np.float64]) -> float:
    """Half the median distance to the nearest other cell; 1 where there is none, or cells lie on each other."""
    if len(position) < 2:
        return 1.0
    distance, _ = KDTree(position).query(position, k=2)
    return float(np.median(distance[:, 1])) / 2 or 1.0
