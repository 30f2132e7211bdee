r"""Whether the uncertainty of predicted positions is calibrated.

The uncertainty :math:`u_i` is the root-mean-square distance of the position of cell i from its prediction, over all D
dimensions. For an isotropic Gaussian :math:`D e_i^2 / u_i^2` has a χ² distribution with D degrees of freedom, where
:math:`e_i` is the error, so that a share q of the errors is at most :math:`u_i \sqrt{\chi^2_D(q) / D}`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import chi2, spearmanr

from alphastomics.metrics._align import rigid_motion
from alphastomics.metrics._distances import check_pair

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SCORES = ("coverage", "spread_over_error", "spread_spearman")
SHARE = 0.8


def spread_scores(
    true: ArrayLike,
    predicted: ArrayLike,
    uncertainty: ArrayLike,
    *,
    share: float = SHARE,
    reflection: bool | None = None,
    align: bool = True,
) -> dict[str, float]:
    r"""Score the uncertainty of predicted positions by their errors after the best rotation and shift.

    The units of the prediction count: a calibrated uncertainty of positions in wrong units is not calibrated for the truth.
    An uncertainty from K draws is itself inexact, which reduces the expected ``coverage`` to the share of an F distribution
    with D and K D degrees of freedom below :math:`\chi^2_D(q) / D`.

    Parameters
    ----------
    true
        True positions, (n_cells, n_dims).
    predicted
        Predicted positions of the same cells, (n_cells, n_dims), in the units of the truth.
    uncertainty
        Standard deviation of each position over all dimensions, (n_cells,), same units. Cells for which it is NaN are
        aligned with the others but not scored.
    share
        Probability of the region of ``coverage``.
    reflection
        Whether to allow a reflection. By default in two dimensions, but not in three.
    align
        Whether to compare after the best rotation and shift; ``False`` if the two frames agree.

    Returns
    -------
    Undefined scores are NaN.

    - ``coverage``: share of the cells whose error is within the region of probability `share` of an isotropic Gaussian with
      this standard deviation; `share` if calibrated, smaller if the uncertainty is too small.
    - ``spread_over_error``: root mean square of the uncertainty over that of the error; 1 if calibrated.
    - ``spread_spearman``: rank correlation of uncertainty and error over cells; better when larger.

    Raises
    ------
    ValueError
        If the shapes differ, a position is not finite, an uncertainty is negative or infinite, or `share` is not between 0
        and 1.
    """
    y, x = check_pair(true, predicted)
    u = np.asarray(uncertainty, dtype=np.float64)
    if u.shape != (len(y),):
        raise ValueError(f"uncertainty must be of shape ({len(y)},), one per cell, got {u.shape}")
    if (u < 0).any() or np.isinf(u).any():
        raise ValueError("uncertainty must be finite or NaN, and not negative")
    if not 0 < share < 1:
        raise ValueError(f"share must be between 0 and 1, got {share}")
    known = ~np.isnan(u)
    if not known.any():
        return dict.fromkeys(SCORES, float("nan"))
    moved = rigid_motion(x, y, reflection=reflection) if align else x
    e, u = np.linalg.norm(moved - y, axis=1)[known], u[known]
    n_dims, error = y.shape[1], np.sqrt(np.mean(e**2))
    # The rank correlation of equal values is undefined; scipy returns NaN with a warning.
    constant = np.ptp(u) == 0 or np.ptp(e) == 0
    return {
        "coverage": float(np.mean(e <= u * np.sqrt(chi2.ppf(share, n_dims) / n_dims))),
        "spread_over_error": float(np.sqrt(np.mean(u**2)) / error) if error > 0 else float("nan"),
        "spread_spearman": float("nan") if constant else float(spearmanr(u, e).statistic),
    }
