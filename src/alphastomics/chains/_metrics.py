r"""Frame-aligned point error of a chain (Jumper et al. 2021, algorithm 28), a score that distinguishes mirror images.

.. math::

    \mathrm{FAPE} = \frac{1}{Z\, \lvert P \rvert} \sum_{(i, j) \in P} \min\Big(
        \big\lVert \hat R_i^\top (\hat x_j - \hat x_i) - R_i^\top (x_j - x_i) \big\rVert,\; \tau \Big)

over the pairs P of a cell i that has a frame in the truth and another cell j. The columns of a frame are

.. math::

    e_1 \propto x_{i+1} - x_i, \qquad e_2 \propto u - (u \cdot e_1)\, e_1, \quad u = x_{i-1} - x_i, \qquad
    e_3 = e_1 \times e_2.

Where points coincide or the chain is straight, the predicted frame is the identity. The loss for training is in
:mod:`alphastomics.chains.fape`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from alphastomics.metrics._distances import check_pair, row_chunks

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[np.float64]

STRAIGHT = 1e-3  # a cell has no frame if the sine of the angle at it is smaller


def chain_fape(
    true: ArrayLike, predicted: ArrayLike, order: ArrayLike, *, clamp: float = 10.0, scale: float = 10.0
) -> float:
    """Frame-aligned point error between a chain and its prediction.

    0 is a perfect prediction, ``clamp / scale`` the largest error. The error is invariant to rotations and shifts of either
    side, but not to reflections or changes of scale. The defaults are those of Jumper et al. for positions in Å.

    Parameters
    ----------
    true
        True positions, (n_cells, 3).
    predicted
        Predicted positions of the same cells in the units of the truth, (n_cells, 3).
    order
        Place of each cell in the chain, distinct integers, (n_cells,); the rows may come in any order. A cell has a frame
        if both adjacent places are present and the chain is not straight there.
    clamp
        τ, at which errors are clamped, in units of the positions.
    scale
        Z, by which errors are divided, in units of the positions.

    Returns
    -------
    The error, without unit; NaN if no cell has a frame.

    Raises
    ------
    ValueError
        If positions differ in shape, are not finite or not three-dimensional, ``order`` is not one distinct integer per cell,
        or ``clamp`` or ``scale`` is not positive.
    """
    y, x = check_pair(true, predicted)
    if y.shape[1] != 3:
        raise ValueError(f"a chain has frames in 3 dimensions, not in {y.shape[1]}")
    if not (clamp > 0 and scale > 0):
        raise ValueError(f"clamp={clamp} and scale={scale} must be positive lengths")
    place = _check_order(order, len(y))
    by_place = np.argsort(place)
    y, x, place = y[by_place], x[by_place], place[by_place]
    axes_true, bent = _frames(y)
    axes_predicted, _ = _frames(x)
    inner = 1 + np.flatnonzero(bent & (place[2:] - place[:-2] == 2))
    if len(inner) == 0:
        return float("nan")
    total = 0.0
    for rows in row_chunks(len(inner), 3 * len(y)):
        i = inner[rows]
        local_true = (y - y[i, None]) @ axes_true[i - 1]
        local_predicted = (x - x[i, None]) @ axes_predicted[i - 1]
        # The error of the cell itself, j = i, is 0.
        total += np.minimum(np.linalg.norm(local_predicted - local_true, axis=-1), clamp).sum()
    return float(total / (scale * len(inner) * (len(y) - 1)))


def _check_order(order: ArrayLike, n_cells: int) -> NDArray[np.int64]:
    values = np.asarray(order)
    if values.shape != (n_cells,):
        raise ValueError(f"order must be of shape ({n_cells},), one place per cell, got {values.shape}")
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all() or (values != np.round(values)).any():
        raise ValueError("order must be integers: the place of each cell in the chain")
    if len(np.unique(values)) < n_cells:
        raise ValueError("order gives one place to several cells; score one chain at a time")
    return values.astype(np.int64)


def _frames(points: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Axes (n - 2, 3, 3) at the inner points (in order), and whether the chain is bent there, (n - 2,)."""
    after, before = points[2:] - points[1:-1], points[:-2] - points[1:-1]
    e_1 = _normalized(after)
    across = before - (before * e_1).sum(1, keepdims=True) * e_1
    bent = after.any(1) & (np.linalg.norm(across, axis=1) > STRAIGHT * np.linalg.norm(before, axis=1))
    e_2 = _normalized(across)
    axes = np.stack([e_1, e_2, np.cross(e_1, e_2)], axis=-1)
    return np.where(bent[:, None, None], axes, np.eye(3)), bent


def _normalized(vectors: Array) -> Array:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
