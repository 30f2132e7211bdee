"""Anatomy of a synthetic tissue: outline, regions of the cell types, smooth fields.

Lengths are in units of the largest extent of the body; :func:`alphastomics.datasets.synthetic_tissue` converts them to
micrometers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import KDTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

__all__ = ["Anatomy", "SmoothFields", "draw_anatomy", "draw_cell_types", "draw_positions"]

_N_SPINE = 40  # balls along the spine, enough that the outline is smooth
_MISPLACED = 0.05  # fraction of cells whose type does not depend on the region
_N_WAVES = 16
_RELAXATION_STEPS = 3
_N_PROBES = 8192  # random points for the volume and the fractions of cell types


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A body of overlapping balls, and the regions of its cell types.

    Attributes
    ----------
    centers, radii
        Balls whose union is the body, of shape (n_balls, n_dims) and (n_balls,).
    volume
        Area (2D) or volume (3D) of the union.
    type_names
        Name of each cell type by the shape of its region: ``layer_*``, ``patch_*`` or ``scattered_*``.
    layer_depth
        Depth of each layer, (n_types,), NaN for other regions.
    patch_centers
        Center of each patch, (n_types, n_dims), NaN for other regions.
    widths
        Standard deviation of a region, (n_types,).
    bias
        Log weight of each type, which sets its fraction, (n_types,).
    shares
        Expected fraction of each type, (n_types,).
    """

    centers: Array
    radii: Array
    volume: float
    type_names: tuple[str, ...]
    layer_depth: Array
    patch_centers: Array
    widths: Array
    bias: Array
    shares: Array

    def depth(self, points: Array) -> Array:
        r"""Depth below the outline, :math:`d(u) = \max_k (1 - |u - c_k| / r_k)`: 1 on the spine, 0 on the outline."""
        return _depth(points, self.centers, self.radii)

    def type_probabilities(self, points: Array) -> Array:
        r"""Regional composition, (n_points, n_types).

        :math:`p(k | u) = (1 - \epsilon)\,\mathrm{softmax}_k(b_k - \delta_k(u)^2 / 2 w_k^2) + \epsilon\,\pi_k`, where
        :math:`\delta_k` is the distance to the center of a patch, the difference to the depth of a layer, or 0.
        """
        logits = self.bias + _region_logits(self, points)
        weights = np.exp(logits - logits.max(1, keepdims=True))
        regional: Array = weights / weights.sum(1, keepdims=True)
        return (1 - _MISPLACED) * regional + _MISPLACED * self.shares


@dataclass(frozen=True, kw_only=True)
class SmoothFields:
    r"""Smooth random functions of position, of zero mean and unit variance.

    Random Fourier features (Rahimi and Recht 2007) of a Gaussian process with covariance
    :math:`\exp(-|u - v|^2 / 2 \ell^2)`:
    :math:`f(u) = \sqrt{2 / M} \sum_m \cos(\omega_m \cdot u + \varphi_m)`, :math:`\omega_m \sim N(0, \ell^{-2} I)`.

    Attributes
    ----------
    frequency, phase
        :math:`\omega` of shape (n_dims, n_fields, M) and :math:`\varphi` of shape (n_fields, M).
    """

    frequency: Array
    phase: Array

    @classmethod
    def draw(cls, n_dims: int, n_fields: int, length_scale: float, rng: np.random.Generator) -> SmoothFields:
        """Draw functions that vary over a length scale."""
        frequency = rng.normal(scale=1 / length_scale, size=(n_dims, n_fields, _N_WAVES))
        return cls(frequency=frequency, phase=rng.uniform(0, 2 * np.pi, size=(n_fields, _N_WAVES)))

    def __call__(self, points: Array) -> Array:
        """Values at the points, (n_points, n_fields)."""
        waves: Array = np.cos(np.tensordot(points, self.frequency, axes=1) + self.phase)
        values: Array = np.sqrt(2 / _N_WAVES) * waves.sum(2)
        return values


def draw_anatomy(n_dims: int, n_types: int, rng: np.random.Generator) -> Anatomy:
    """Draw an embryo-like body (a curved tube with a head, a tail and one bulge) and the regions of its cell types."""
    centers, radii = _body(n_dims, rng)
    n_layers, n_scattered = n_types // 3, int(n_types >= 3)
    n_patches = n_types - n_layers - n_scattered
    kinds = ["layer"] * n_layers + ["patch"] * n_patches + ["scattered"] * n_scattered
    layer_depth, widths = np.full(n_types, np.nan), np.full(n_types, np.inf)
    patch_centers = np.full((n_types, n_dims), np.nan)
    layers, patches = slice(0, n_layers), slice(n_layers, n_layers + n_patches)
    layer_depth[layers] = (np.arange(n_layers) + rng.uniform(0.1, 0.4, n_layers)) / max(n_layers, 1)
    widths[layers] = rng.uniform(0.5, 0.8, n_layers) / max(n_layers, 1) / 2
    widths[patches] = rng.uniform(0.7, 1.2, n_patches) * 0.2 / max(n_patches, 1) ** (1 / n_dims)
    weights = np.where([kind == "scattered" for kind in kinds], 10.0, 20.0)
    shares = rng.dirichlet(weights)
    inside = _inside(centers, radii, _N_PROBES, rng)
    low, high = _box(centers, radii)
    patch_centers[patches] = _spread_out(inside, n_patches)
    anatomy = Anatomy(
        centers=centers,
        radii=radii,
        volume=float(np.prod(high - low)) * len(inside) / _N_PROBES,
        type_names=tuple(f"{kind}_{i}" for i, kind in enumerate(kinds)),
        layer_depth=layer_depth,
        patch_centers=patch_centers,
        widths=widths,
        bias=np.zeros(n_types),
        shares=shares,
    )
    return _with_shares(anatomy, inside)


def draw_positions(anatomy: Anatomy, n_cells: int, rng: np.random.Generator) -> Array:
    r"""Draw cells with a soft minimum spacing, (n_cells, n_dims).

    Uniform points inside the outline repel each other: with :math:`\ell = (V / n)^{1 / D}`, every step adds
    :math:`\tfrac14 \sum_j \max(0, \ell - |x_i - x_j|)\,(x_i - x_j) / |x_i - x_j|` over the six nearest cells.
    A cell that would leave the body is not moved.
    """
    points = _uniform(anatomy, n_cells, rng)
    spacing = (anatomy.volume / n_cells) ** (1 / points.shape[1])
    n_neighbors = min(7, n_cells)
    for _ in range(_RELAXATION_STEPS if n_cells > 1 else 0):
        distance, index = KDTree(points).query(points, k=n_neighbors)
        away = points[:, None] - points[index]
        push = np.maximum(spacing - distance, 0) / np.maximum(distance, 1e-12)
        moved = points + 0.25 * (push[..., None] * away).sum(1)
        points = np.where(anatomy.depth(moved)[:, None] > 0, moved, points)
    return points


def draw_cell_types(anatomy: Anatomy, points: Array, rng: np.random.Generator) -> NDArray[np.intp]:
    """Draw one cell type per point from :meth:`Anatomy.type_probabilities`, (n_points,)."""
    cumulative = anatomy.type_probabilities(points).cumsum(1)
    types: NDArray[np.intp] = np.argmax(rng.random((len(points), 1)) * cumulative[:, -1:] < cumulative, axis=1)
    return types


def _body(n_dims: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Centers and radii of balls along a bent spine, wide at the head and thin at the tail, and of one bulge."""
    s = np.linspace(0, 1, _N_SPINE)
    heading = np.pi * (1.1 * s + 0.25 * s**2) + 0.15 * np.sin(2 * np.pi * s + rng.uniform(0, 2 * np.pi))
    centers = np.zeros((_N_SPINE, n_dims))
    centers[:, :2] = np.cumsum(np.stack([np.cos(heading), np.sin(heading)], axis=1), axis=0) / _N_SPINE
    if n_dims == 3:
        # Without a bend out of the plane the body would equal its mirror image.
        centers[:, 2] = 0.12 * np.sin(1.5 * np.pi * s + rng.uniform(-0.3, 0.3))
    radii = 0.055 + 0.075 * (1 - s) + 0.07 * np.exp(-(((s - 0.08) / 0.1) ** 2))
    radii *= 1 + 0.08 * np.sin(4 * np.pi * s + rng.uniform(0, 2 * np.pi))
    where = _N_SPINE // 2
    outward = np.zeros(n_dims)
    outward[:2] = np.sin(heading[where]), -np.cos(heading[where])
    centers = np.vstack([centers, centers[where] + rng.uniform(0.9, 1.1) * radii[where] * outward])
    radii = np.append(radii, rng.uniform(0.08, 0.1))
    low, high = _box(centers, radii)
    extent = (high - low).max()
    return (centers - (low + high) / 2) / extent, radii / extent


def _box(centers: Array, radii: Array) -> tuple[Array, Array]:
    return (centers - radii[:, None]).min(0), (centers + radii[:, None]).max(0)


def _depth(points: Array, centers: Array, radii: Array) -> Array:
    squared = (points**2).sum(1)[:, None] - 2 * points @ centers.T + (centers**2).sum(1)
    depth: Array = np.max(1 - np.sqrt(np.maximum(squared, 0)) / radii, axis=1)
    return depth


def _inside(centers: Array, radii: Array, n_tried: int, rng: np.random.Generator) -> Array:
    tried = rng.uniform(*_box(centers, radii), size=(n_tried, centers.shape[1]))
    return tried[_depth(tried, centers, radii) > 0]


def _uniform(anatomy: Anatomy, n_points: int, rng: np.random.Generator) -> Array:
    """Uniform points inside the outline, by rejection from its box."""
    points = np.empty((0, anatomy.centers.shape[1]))
    while len(points) < n_points:
        n_tried = 256 + 4 * (n_points - len(points))
        points = np.concatenate([points, _inside(anatomy.centers, anatomy.radii, n_tried, rng)])
    return points[:n_points]


def _spread_out(points: Array, n_chosen: int) -> Array:
    """Farthest-point sampling: each chosen point is farthest from those before it."""
    chosen = np.empty((n_chosen, points.shape[1]))
    distance = np.full(len(points), np.inf)
    for i in range(n_chosen):
        chosen[i] = points[np.argmax(distance)]
        distance = np.minimum(distance, np.linalg.norm(points - chosen[i], axis=1))
    return chosen


def _region_logits(anatomy: Anatomy, points: Array) -> Array:
    to_layer = anatomy.depth(points)[:, None] - anatomy.layer_depth
    to_patch = np.linalg.norm(points[:, None] - anatomy.patch_centers, axis=2)
    offset = np.nan_to_num(np.where(np.isnan(to_layer), to_patch, to_layer))  # 0 for a scattered type
    return -(offset**2) / (2 * anatomy.widths**2)


def _with_shares(anatomy: Anatomy, points: Array) -> Anatomy:
    """Set the biases so that the mean composition over the points equals the shares, by iterative scaling."""
    for _ in range(30):
        mean = anatomy.type_probabilities(points).mean(0)
        anatomy = replace(anatomy, bias=anatomy.bias + np.log(anatomy.shares / mean))
    return anatomy
