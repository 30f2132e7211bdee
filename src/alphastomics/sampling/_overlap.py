r"""Removal of overlaps: the distances between neighboring cells of a tissue.

In a conditional mean, cells that resemble each other lie nearly at the same place. In a tissue they cannot overlap. With
radii :math:`r_i`, half of the nearest-neighbor distances of reference cells in random order, the cells are moved as little as
possible to positions with

.. math:: \lVert y_i - y_j \rVert \ge s\,(r_i + r_j) \quad \text{for all } i \ne j

by position-based dynamics (Müller et al. 2007, J. Vis. Commun. Image Represent. 18:109): in every iteration the two cells of an
overlapping pair are moved apart, each by half of the overlap. The factor s increases until the median nearest-neighbor
distance is that of the reference, or a largest value is reached. Cells move by a few spacings, so that neighborhoods and the
arrangement of the tissue are preserved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import KDTree

from alphastomics.sampling._scale import rms_radius

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LEVELS = np.linspace(0, 1, 129)
N_NEIGHBORS = 10  # with which a cell may overlap
FIRST_FACTOR, LAST_FACTOR, FACTOR_STEP = 0.6, 1.6, 0.05  # of the radii
ITERATIONS_PER_STEP, MAX_ITERATIONS = 3, 90
JITTER = 1e-3  # of the spacing, by which coinciding cells are separated
CONTACT = 1e-6  # of the spacing: cells that were moved apart touch, and overlap by rounding errors
MAX_VOLUME = 1.5  # of a specimen, in volumes of the largest reference slice; more cells come from several specimens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NearestDistances:
    """Nearest-neighbor distances of the reference.

    Parameters
    ----------
    quantiles
        Quantiles (L,) in model units.
    n_cells
        Number of cells of the largest slice, (1,).
    radius
        Root mean square radius of a slice in model units, the mean over slices, (1,).
    """

    quantiles: NDArray[np.float32]
    n_cells: NDArray[np.float32]
    radius: NDArray[np.float32]

    @classmethod
    def fit(cls, slices: Sequence[NDArray[np.float32]]) -> NearestDistances:
        """Distances in slices of positions (n, D); 0 without two cells in a slice."""
        distances = [KDTree(x).query(x, 2)[0][:, 1] for x in slices if len(x) > 1]
        quantiles = np.quantile(np.concatenate(distances), LEVELS) if distances else np.zeros(len(LEVELS))
        largest, radius = max(map(len, slices)), np.mean([rms_radius(x) for x in slices])
        return cls(
            quantiles=quantiles.astype(np.float32),
            n_cells=np.array([largest], dtype=np.float32),
            radius=np.array([radius], dtype=np.float32),
        )

    def is_valid(self, n_genes: int, n_dims: int) -> bool:
        """Whether shapes and ranges are those of a fit."""
        return (
            self.quantiles.shape == LEVELS.shape
            and self.n_cells.shape == self.radius.shape == (1,)
            and bool(self.n_cells[0] >= 1)
            and all(bool((x >= 0).all()) for x in (self.quantiles, self.radius))
        )

    def of_cells(self, n: int, n_dims: int) -> NDArray[np.float64]:
        """Distances (n,), ascending, of a slice of ``n`` cells.

        Cells of several specimens, as in a pool of dissociated cells, are placed in the volume of one, more densely.
        """
        density = max(1.0, n / (MAX_VOLUME * float(self.n_cells[0])))
        return np.interp((np.arange(n) + 0.5) / n, LEVELS, self.quantiles) / density ** (1 / n_dims)


def remove_overlaps(
    position: NDArray[np.float64],
    nearest: NearestDistances,
    rng: np.random.Generator,
    fixed: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Move overlapping cells (N, D) apart; cells that are ``fixed`` (N,) do not move."""
    n, n_dims = position.shape
    distances = nearest.of_cells(n, n_dims)
    median = float(np.median(distances)) if n else 0.0
    if n < 2 or median == 0:
        return position
    weight = np.ones(n) if fixed is None else np.where(fixed, 0.0, 1.0)
    radius = rng.permutation(distances) / 2
    y = position + weight[:, None] * JITTER * median * rng.standard_normal(position.shape)
    factor = FIRST_FACTOR
    for iteration in range(MAX_ITERATIONS):
        distance, neighbors = (each[:, 1:] for each in KDTree(y).query(y, min(N_NEIGHBORS + 1, n)))
        if iteration % ITERATIONS_PER_STEP == 0:
            if np.median(distance[:, 0]) >= median:
                break
            factor = min(factor + FACTOR_STEP, LAST_FACTOR)
        overlap = np.maximum(factor * (radius[:, None] + radius[neighbors]) - distance, 0.0)
        direction = (y[:, None] - y[neighbors]) / np.maximum(distance, np.finfo(float).tiny)[..., None]
        n_overlaps = np.maximum((overlap > CONTACT * median).sum(1), 1)
        y += (weight / (2 * np.sqrt(n_overlaps)))[:, None] * (overlap[..., None] * direction).sum(1)
    return y
