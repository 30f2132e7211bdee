r"""Motion of placed cells into the known outline of a tissue.

A rotation or reflection R and a shift :math:`\delta` minimize the mean squared distance between the cells x and a grid of points U within
the outline, in both directions,

.. math:: \frac1n \sum_i \min_{u \in U} \lVert x_i R + \delta - u \rVert^2 + \frac1{|U|} \sum_{u \in U} \min_i \lVert x_i R + \delta - u \rVert^2 ,

by iterative closest points (Besl & McKay 1992, IEEE Trans. Pattern Anal. Mach. Intell. 14:239) from evenly spaced rotations of both mirror
images. Cells that are then outside are moved to the nearest point of the outline.
"""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.spatial import KDTree

from alphastomics import _keys
from alphastomics.data._checks import check_text
from alphastomics.data._plane import constant_column, find_bounds
from alphastomics.metrics import RigidTransform, rigid_align
from alphastomics.tl._placed import read_slices
from alphastomics.tl._tables import read_coordinates

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import ArrayLike, NDArray
    from shapely import Polygon

    Array = NDArray[np.float64]

N_POINTS = 1000  # of the grid, and cells that are compared with it
N_ROTATIONS = 12  # of each mirror image
MAX_ITERATIONS = 100
SIZE_RATIO = 10.0  # of the extent of the cells to that of the outline, above which a warning is issued
SIMILAR = 1.5  # ratio of errors below which two orientations fit equally well


def fit_outline(
    adata: AnnData,
    outline: ArrayLike | Polygon,
    *,
    basis: str = _keys.RECONSTRUCTED,
    key_added: str | None = None,
    library_key: str | None = None,
    copy: bool = False,
) -> AnnData | None:
    """Move placed cells into the known outline of their tissue.

    The frame of a placement is arbitrary: it is rotated, reflected and shifted such that it fills the outline best. Cells that are
    then outside are moved to the nearest point of the outline. If a symmetric outline does not determine the frame, the orientation
    nearest to that of the placement is kept, with a warning. The scale does not change. Where some positions were known, the frame is theirs, and only placed cells outside are moved.

    Parameters
    ----------
    adata
        Placed cells of one slice, in two dimensions. A third column that is constant does not change.
    outline
        Vertices of a polygon, (n_vertices, 2), or a polygon of shapely, with or without holes, in the units of the positions.
    basis
        Key of ``obsm`` with the placement. Cells that were not placed (NaN) remain so.
    key_added
        Key of ``obsm`` for the result; `basis` when None.
    library_key
        Column of ``obs`` with the slice of each cell; that of the placement when None.
    copy
        Return a modified copy instead of writing to `adata`.

    Returns
    -------
    None, or the modified copy. ``obsm[key_added]`` has the positions within the outline, in the shape of `basis`. What accompanies
    `basis` in ``obs`` and ``uns``, such as its uncertainty, is copied to another `key_added`.

    Raises
    ------
    KeyError
        If ``obsm`` has no `basis`.
    ValueError
        If there are no cells or several slices, positions are not two-dimensional, or the outline is not a valid polygon.

    Warns
    -----
    UserWarning
        If the outline does not determine the frame, or its size and that of the placement differ tenfold.

    Examples
    --------
    >>> asx.tl.reconstruct(query, model=model)
    >>> asx.tl.fit_outline(query, [[0, 0], [3000, 0], [3000, 2000], [0, 2000]])
    """
    key = basis if key_added is None else key_added
    check_text(key, "key_added", "obsm")
    position = read_coordinates(adata, basis, "basis").copy()
    if not len(position):
        raise ValueError("adata has no cells; pass placed cells of one slice")
    finite = position[np.isfinite(position).all(1)]
    column = constant_column(find_bounds(finite)[None]) if len(finite) else None
    axes = [axis for axis in range(position.shape[1]) if axis != column]
    if len(axes) != 2:
        raise ValueError(f'an outline has two dimensions, obsm["{basis}"] has {len(axes)}; pass another basis=…')
    slices = read_slices(adata, basis, library_key)
    if len(slices) > 1:
        names = ", ".join(piece.name for piece in slices[:3])
        raise ValueError(f"there are {len(slices)} slices ({names}, …), and one outline; pass the cells of one slice")
    polygon = _polygon(outline)
    (piece,) = slices
    placed = piece.placed[np.isfinite(position[piece.placed]).all(1)]
    if len(placed):
        x = position[placed][:, axes]
        _check_units(x, polygon)
        position[placed[:, None], axes] = _within(_moved(x, polygon) if piece.free else x, polygon)
    result = adata.copy() if copy else adata
    result.obsm[key] = position
    if key != basis:
        _copy_record(result, basis, key)
    return result if copy else None


def _copy_record(adata: AnnData, basis: str, key: str) -> None:
    """Copy what accompanies the positions of `basis`, such as which cells were placed, in place of that of an earlier `key`."""
    for suffix in _keys.POSITION_SUFFIXES:
        if basis + suffix in adata.obs:
            adata.obs[key + suffix] = adata.obs[basis + suffix]
        elif key + suffix in adata.obs:
            del adata.obs[key + suffix]
    adata.uns.pop(key, None)
    if basis in adata.uns:
        adata.uns[key] = deepcopy(adata.uns[basis])


def _polygon(outline: Any) -> Polygon:
    """The outline as a polygon of shapely."""
    import shapely

    polygon = outline
    if not isinstance(outline, shapely.Geometry):
        try:
            vertices = np.asarray(outline, dtype=float)
        except (TypeError, ValueError) as error:
            raise ValueError("outline is not an array of numbers; pass vertices, (n_vertices, 2)") from error
        if vertices.ndim != 2 or vertices.shape[1] != 2 or len(vertices) < 3 or not np.isfinite(vertices).all():
            raise ValueError(
                f"outline has shape {vertices.shape}; pass at least three finite vertices, (n_vertices, 2)"
            )
        polygon = shapely.Polygon(vertices)
    if not polygon.is_valid or not polygon.area:
        raise ValueError("outline is not a valid polygon: its sides cross, or it has no area; correct its vertices")
    return polygon


def _check_units(x: Array, polygon: Polygon) -> None:
    """Warn if the cells (n, 2) and the outline differ so much in size that their units may differ."""
    cells, area = float(np.ptp(x, axis=0).max()), polygon.area**0.5
    if len(x) > 1 and not area / SIZE_RATIO <= cells <= area * SIZE_RATIO:
        warnings.warn(
            f"the cells extend over {cells:.4g}, and the square root of the area of the outline is {area:.4g}; check that both have "
            "the same units",
            UserWarning,
            stacklevel=3,
        )


def _grid(polygon: Polygon) -> Array:
    """About ``N_POINTS`` points (n, 2) of a square grid within a polygon."""
    import shapely

    low_x, low_y, high_x, high_y = polygon.bounds
    step = (polygon.area / N_POINTS) ** 0.5
    axes = np.arange(low_x + step / 2, high_x, step), np.arange(low_y + step / 2, high_y, step)
    points = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)
    inside = points[shapely.contains_xy(polygon, *points.T)]
    return inside if len(inside) else np.asarray(polygon.representative_point().coords)


def _moved(x: Array, polygon: Polygon) -> Array:
    """Positions (n, 2) rotated, reflected and shifted such that they fill a polygon."""
    grid = _grid(polygon)
    cells = x[np.random.default_rng(0).permutation(len(x))[:N_POINTS]]
    fits = []
    for angle in np.arange(N_ROTATIONS) * 2 * np.pi / N_ROTATIONS:
        c, s = np.cos(angle), np.sin(angle)
        for rotation in (np.array([[c, -s], [s, c]]), np.array([[c, s], [s, -c]])):
            start = RigidTransform(rotation=rotation, translation=grid.mean(0) - rotation @ cells.mean(0))
            fits.append(_closest_points(cells, grid, start))
    error, best = min(fits, key=lambda fit: fit[0])
    # Of orientations that fit nearly equally well, the one nearest to that of the placement: the trace decreases with the angle.
    similar = [motion for other, motion in fits if other <= SIMILAR * error]
    chosen = max(similar, key=lambda motion: float(np.trace(motion.rotation)))
    radius = np.sqrt(((cells - cells.mean(0)) ** 2).sum(1).mean())
    if max(np.linalg.norm(each.apply(cells) - best.apply(cells), axis=1).mean() for each in similar) > radius / 2:
        warnings.warn(
            f"the outline does not determine the frame: {len(similar)} of {len(fits)} orientations fit it within {SIMILAR:g} times the "
            "smallest error. The one nearest to that of the placement is kept; known positions would determine the frame.",
            UserWarning,
            stacklevel=3,
        )
    return chosen.apply(x)


def _closest_points(cells: Array, grid: Array, motion: RigidTransform) -> tuple[float, RigidTransform]:
    """Smallest error, and the rigid motion of cells (n, 2) that has it."""
    tree, fit = KDTree(grid), (np.inf, motion)
    for _ in range(MAX_ITERATIONS):
        moved = motion.apply(cells)
        (to_grid, point), (to_cells, cell) = tree.query(moved), KDTree(moved).query(grid)
        error = float((to_grid**2).mean() + (to_cells**2).mean())
        if error >= fit[0]:
            break
        fit = error, motion
        source, target = np.concatenate([cells, cells[cell]]), np.concatenate([grid[point], grid])
        weights = np.repeat([1 / len(cells), 1 / len(grid)], [len(cells), len(grid)])
        motion = rigid_align(source, target, weights=weights)[1]
    return fit


def _within(x: Array, polygon: Polygon) -> Array:
    """Positions (n, 2), those outside of a polygon at its nearest point."""
    import shapely

    outside = ~shapely.intersects_xy(polygon, *x.T)
    lines = shapely.shortest_line(polygon, shapely.points(x[outside]))
    x = x.copy()
    x[outside] = shapely.get_coordinates(lines).reshape(-1, 2, 2)[:, 0]
    return x
