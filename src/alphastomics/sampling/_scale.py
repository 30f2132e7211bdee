r"""Scale of a layout: the mean of uncertain positions is closer to the center than the cells are.

.. math:: y_i = \bar x + s\,(x_i - \bar x), \qquad s = \max\Big(1, \frac{\rho}{r} \min\big(1, \tfrac{n}{M}\big)^{1/D}\Big)

with the root mean square radius r of n cells, and that of the reference :math:`\rho`, whose largest slice has M cells. Fewer cells than
that may be a part of a tissue: the radius is at least that of a part with the density of the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def restore_radius(position: Tensor, *, reference_radius: float, n_reference: float) -> Tensor:
    """Positions (N, D) with the radius that follows from that of the reference, whose largest slice has ``n_reference`` cells."""
    n, n_dims = position.shape
    radius, center = rms_radius(position), position.mean(0)
    if not radius:
        return position
    share = min(1.0, n / n_reference) ** (1 / n_dims)
    return center + max(1.0, share * reference_radius / radius) * (position - center)


def rms_radius(position: Any) -> float:
    """Root mean square distance of positions (n, D), an array or a tensor, from their center."""
    return float(((position - position.mean(0)) ** 2).sum(1).mean()) ** 0.5
