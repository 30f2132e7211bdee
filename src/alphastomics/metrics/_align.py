r"""Rigid alignment: the rotation, the shift and optionally the scale that bring one set of cells closest to another.

.. math::

    \min_{s, R, b} \sum_i w_i \, \lVert s R x_i + b - y_i \rVert^2, \qquad
    \sum_i w_i (y_i - \bar y)(x_i - \bar x)^\top = U S V^\top, \quad
    R = U \,\mathrm{diag}(1, \dots, 1, d)\, V^\top, \quad
    s = \frac{\mathrm{tr}(S \,\mathrm{diag}(1, \dots, 1, d))}{\sum_i w_i \lVert x_i - \bar x \rVert^2}

(Kabsch 1976, Umeyama 1991), with :math:`d = \det(U) \det(V)` for a proper rotation and :math:`d = 1` where a reflection
is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from alphastomics.metrics._distances import check_pair

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class RigidTransform:
    """The map x → scale · rotation · x + translation.

    Parameters
    ----------
    rotation
        Orthogonal matrix, (n_dims, n_dims); its determinant is −1 if the map reflects.
    translation
        Shift applied last, (n_dims,), in the units of the target.
    scale
        Factor; 1 for a rigid map.
    """

    rotation: NDArray[np.float64]
    translation: NDArray[np.float64]
    scale: float = 1.0

    def apply(self, positions: ArrayLike) -> NDArray[np.float64]:
        """Map positions, (n_cells, n_dims)."""
        return self.scale * np.asarray(positions, dtype=np.float64) @ self.rotation.T + self.translation


def rigid_align(
    source: ArrayLike,
    target: ArrayLike,
    *,
    weights: ArrayLike | None = None,
    scale: bool = False,
    reflection: bool = True,
) -> tuple[NDArray[np.float64], RigidTransform]:
    """Align positions with other positions of the same cells (weighted Kabsch, or Umeyama with ``scale=True``).

    Parameters
    ----------
    source
        Positions to move, (n_cells, n_dims).
    target
        Positions of the same cells to align with, (n_cells, n_dims).
    weights
        Non-negative weight of each cell, (n_cells,); equal by default. A cell of weight 0 is moved but not fitted.
    scale
        Whether to fit a common scale factor as well.
    reflection
        Whether to allow a reflection.

    Returns
    -------
    The moved source, (n_cells, n_dims), in the units of the target, and the :class:`RigidTransform` that moved it.

    Raises
    ------
    ValueError
        If the shapes differ, a value is not finite, there is no cell, or the weights are negative or all zero.
    """
    x, y = check_pair(target, source)[::-1]
    w = _normalized_weights(weights, len(x))
    x_mean, y_mean = w @ x, w @ y
    x_centered = x - x_mean
    u, s, vt = np.linalg.svd((w[:, None] * (y - y_mean)).T @ x_centered)
    signs = np.ones(len(s))
    if not reflection:
        signs[-1] = np.sign(np.linalg.det(u) * np.linalg.det(vt))
    rotation = (u * signs) @ vt
    factor = 1.0
    if scale:
        spread = float(w @ np.square(x_centered).sum(axis=1))
        # A source that is a single point is moved to the center of the target.
        factor = float(s @ signs) / spread if spread > 0 else 0.0
    transform = RigidTransform(rotation=rotation, translation=y_mean - factor * rotation @ x_mean, scale=factor)
    return factor * x_centered @ rotation.T + y_mean, transform


def _normalized_weights(weights: ArrayLike | None, n_cells: int) -> NDArray[np.float64]:
    if n_cells == 0:
        raise ValueError("there is no cell to align")
    w = np.ones(n_cells) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != (n_cells,):
        raise ValueError(f"weights must be of shape ({n_cells},), one per cell, got {w.shape}")
    if not np.isfinite(w).all() or (w < 0).any() or w.sum() == 0:
        raise ValueError("weights must be finite, not negative, and not all zero")
    return w / w.sum()


def aligned_rmsd(true: ArrayLike, predicted: ArrayLike, *, align: bool = True) -> float:
    """Root-mean-square distance after the best rotation, reflection, shift and scale, relative to the RMS radius of the truth.

    0 is a perfect prediction; a prediction with every cell at the center scores 1. Mirror images and other units change
    nothing; :func:`rigid_rmsd` counts them.

    Parameters
    ----------
    true, predicted
        Positions of the same cells, (n_cells, n_dims).
    align
        Whether to align the prediction with the truth; otherwise both must be in one frame.

    Returns
    -------
    The score, without unit; NaN if the truth is a single point or empty.

    Raises
    ------
    ValueError
        If the shapes differ or a value is not finite.
    """
    y, x = check_pair(true, predicted)
    return _relative_rmsd(y, rigid_align(x, y, scale=True)[0] if align and len(y) else x)


def rigid_rmsd(true: ArrayLike, predicted: ArrayLike, *, reflection: bool | None = None, align: bool = True) -> float:
    """Root-mean-square distance after the best rotation and shift, relative to the RMS radius of the truth.

    In contrast to :func:`aligned_rmsd` the size of the prediction counts, and in three dimensions its handedness: a perfect
    arrangement in half the units scores 0.5, and the mirror image of a three-dimensional tissue more than 0. The score is
    meant for three-dimensional tissues and for checks of the units. A two-dimensional section that is turned over is its
    own mirror image, so :func:`aligned_rmsd`, or this score with a reflection, is usual in two dimensions.

    Parameters
    ----------
    true, predicted
        Positions of the same cells in the same units, (n_cells, n_dims).
    reflection
        Whether to allow a reflection. By default in two dimensions, but not in three.
    align
        Whether to align the prediction with the truth; otherwise both must be in one frame.

    Returns
    -------
    The score, without unit, at least :func:`aligned_rmsd`; NaN if the truth is a single point or empty. A prediction with
    every cell at the center scores 1, one that is too large more.

    Raises
    ------
    ValueError
        If the shapes differ or a value is not finite.

    Examples
    --------
    >>> round(asx.metrics.rigid_rmsd(true, true / 2), 3)
    0.5
    """
    y, x = check_pair(true, predicted)
    return _relative_rmsd(y, rigid_motion(x, y, reflection=reflection) if align and len(y) else x)


def rigid_motion(
    source: NDArray[np.float64], target: NDArray[np.float64], *, reflection: bool | None = None
) -> NDArray[np.float64]:
    """The source (n_cells, n_dims) after the best rotation and shift; a reflection is by default allowed in 2D, not in 3D."""
    allowed = source.shape[1] < 3 if reflection is None else reflection
    return rigid_align(source, target, reflection=allowed)[0]


def _relative_rmsd(y: NDArray[np.float64], x: NDArray[np.float64]) -> float:
    """Root-mean-square distance of x from the truth y, relative to the radius of y; NaN without a radius."""
    radius = np.square(y - y.mean(axis=0)).sum() if len(y) and (y != y[0]).any() else 0.0
    return float(np.sqrt(np.square(x - y).sum() / radius)) if radius > 0 else float("nan")


def procrustes_disparity(true: ArrayLike, predicted: ArrayLike) -> float:
    """Procrustes disparity: squared difference of shapes after each is centered, scaled to unit size and rotated.

    Equals :func:`scipy.spatial.procrustes`, and the square of :func:`aligned_rmsd`. A prediction that is a single point, for
    which scipy raises an error, scores 1.

    Parameters
    ----------
    true, predicted
        Positions of the same cells, (n_cells, n_dims).

    Returns
    -------
    The disparity, in [0, 1]; NaN if the truth is a single point or empty.

    Raises
    ------
    ValueError
        If the shapes differ or a value is not finite.
    """
    return aligned_rmsd(true, predicted) ** 2
