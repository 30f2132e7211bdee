r"""Standard deviation of sampled expression, from a few draws of each value.

.. math::

    s_{ig}^2 = (1 - w)\, V_g(m_{ig}) + w\, v_{ig}, \qquad V_g(m) = a_g + b_g m + c_g m^2

v is the variance over the draws of one value and m the mean that is returned for it. Where most counts are zero, eight draws
of a value are often all zero, which says nothing: v alone hardly ranks the errors of values. The variance of counts is a
function of their mean (Poisson and negative binomial are cases of V, with a = 0), and all cells of a slice together tell it.
Where expression is not of counts b and c are 0.

What a value has of its own beyond V counts as far as it is reproduced: with :math:`\rho` the correlation over cells of
:math:`v - V` between two halves of the draws, mean over genes, and n the number of such halves in all draws,

.. math:: w = \frac{n \rho}{1 + (n - 1) \rho}

is the reliability of v - V (Spearman-Brown), with which the best linear estimate shrinks it. Variances that share
information among many were introduced for genes by :cite:t:`smyth2004`.

Draws come in pairs that share their noise up to its sign. Where a draw is linear in its noise, the mean of a pair is the
conditional mean whatever the noise was, and v is the mean square about the mean of the draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import nnls

if TYPE_CHECKING:
    from numpy.typing import NDArray

TINY = 1e-12


def pooled_sd(
    draws: NDArray[np.float32], mean: NDArray[np.float32], drawn: NDArray[np.bool_] | None = None, *, counts: bool
) -> NDArray[np.float32]:
    """Standard deviation (N, G) of expression in one slice.

    Parameters
    ----------
    draws
        Mirrored draws (K, N, G); a single one has no spread, and NaN is returned.
    mean
        The mean that is returned for them, (N, G).
    drawn
        Values that were drawn, (N, G); the others are held, and their standard deviation is 0. All by default.
    counts
        Whether expression is of counts, and its variance a function of its mean.
    """
    drawn = np.ones(mean.shape, dtype=bool) if drawn is None else drawn
    if len(draws) == 1:
        return np.where(drawn, np.float32(np.nan), np.float32(0))
    own = mirrored_variance(draws)
    trend = np.zeros_like(own)
    for gene in range(mean.shape[1]):
        rows = drawn[:, gene]
        if rows.any():
            trend[rows, gene] = _trend(own[rows, gene], mean[rows, gene].astype(np.float64), counts=counts)
    w = _reliability(draws, trend, drawn)
    return np.where(drawn, np.sqrt((1 - w) * trend + w * own), 0).astype(np.float32)


def mirrored_variance(draws: NDArray[np.float32]) -> NDArray[np.float64]:
    """Variance over mirrored draws (K, N, G), (N, G)."""
    n = len(draws)
    # A draw without its mirror image shifts the mean of all by its share of the noise.
    return np.var(draws, axis=0, dtype=np.float64, ddof=(n % 2) / n)


def _trend(own: NDArray[np.float64], mean: NDArray[np.float64], *, counts: bool) -> NDArray[np.float64]:
    """V (N,) of one gene: non-negative least squares, relative to the mean, by which counts scatter."""
    if not counts:
        return np.full_like(own, own.mean())
    basis = np.stack([np.ones_like(mean), mean, mean**2], axis=1)
    weight = 1 / (mean + max(mean.mean(), TINY))
    return basis @ nnls(weight[:, None] * basis, weight * own)[0]


def _reliability(draws: NDArray[np.float32], trend: NDArray[np.float64], drawn: NDArray[np.bool_]) -> float:
    """w, the share of own - trend that other draws would reproduce; 0 where there are not two pairs to tell it."""
    half = len(draws) // 4 * 2  # of whole pairs
    if half == 0:
        return 0.0
    first, second = (
        np.where(drawn, mirrored_variance(part) - trend, 0) for part in (draws[:half], draws[half : 2 * half])
    )
    n_cells = np.maximum(drawn.sum(0), 1)
    first, second = (np.where(drawn, x - x.sum(0) / n_cells, 0) for x in (first, second))
    norm = np.sqrt((first**2).sum(0) * (second**2).sum(0))
    varies = norm > 0
    if not varies.any():
        return 0.0
    rho = max(0.0, float(((first * second).sum(0)[varies] / norm[varies]).mean()))
    n = len(draws) / half
    return n * rho / (1 + (n - 1) * rho)
