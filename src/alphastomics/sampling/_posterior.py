r"""What the denoiser knows of each cell, kept as a Gaussian where the noise is as fine as the cells are spaced.

Let :math:`y = z_t/\alpha_t = x_0 + n \varepsilon` be the noisy positions and :math:`n = \sigma_t/\alpha_t` their noise. If
what the denoiser knows besides y is a Gaussian :math:`\mathcal N(m_i, 1/p)` for every cell i, its estimate and the error
that it leaves are

.. math::

    \hat x(y, n) = \frac{p\, m + y/n^2}{p + 1/n^2}, \qquad r^2 = \frac{1}{p + 1/n^2} .

Tweedie's formula gives the error, :math:`r^2 = n^2 J` with :math:`J = \frac{1}{ND} \operatorname{tr}\,
\partial \hat x/\partial y`, so that one estimate and its derivative give p and m:

.. math::

    p = \frac{1 - J}{J n^2}, \qquad p\, m = \frac{\hat x / J - y}{n^2} .

The derivative is a finite difference along one random direction (Hutchinson 1990). The estimate at any finer noise then
costs nothing, and its error is what packing has to remove: it is the noise that packing is told.

Regression kriging: what known cells tell of the others beyond what the model made of them.

.. math::

    \delta_{ig} = a_g \sum_{j \in K} w_{ij}\, r_{jg}, \qquad
    r_{jg} = x_{jg} - m_{jg}, \qquad
    w_{ij} \propto \exp\!\Big(-\frac{\lVert p_i - p_j \rVert^2}{2 (h\, d_i)^2}\Big)

over the nearest known cells; m is the model's mean without cell j, :math:`d_i` the distance from i to its fifth known
cell. The width h and the share a of the residual of a gene that its neighbors explain are those of least squared error
where each known cell is left out; with few known cells a is drawn towards the share over all genes. A slice like those of
the reference leaves residuals that are noise, and a is 0; a specimen with a pattern of its own is followed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from scipy.spatial import KDTree
from torch import Tensor

from alphastomics.diffusion.geometry import center
from alphastomics.nn import nearest_neighbors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.nn import MinDistanceNetwork

PROBE = 0.3  # step of the finite difference, in units of the noise
LOWEST = 0.01  # of J


class GaussianPosterior(NamedTuple):
    """The Gaussian N(m, 1/p) of every cell."""

    precision: Tensor
    """p, ()."""
    weighted_mean: Tensor
    """p m, (1, N, D)."""

    def estimate(self, y: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Estimate (1, N, D) of the clean positions from ``y`` of noise ``n`` (), and the error () that is left."""
        precision = self.precision + n**-2
        return (self.weighted_mean + y / n**2) / precision, precision**-0.5

    def packed(self, min_distance: MinDistanceNetwork, y: Tensor, n: Tensor, spacing: float) -> Tensor:
        """Estimate (1, N, D) after packing, which removes what is left of the error; ``spacing`` as of ``y``."""
        x, error = self.estimate(y, n)
        x = x[0] / spacing
        return min_distance(x, error / spacing, nearest_neighbors(x, min_distance.n_neighbors))[None] * spacing


def estimate_posterior(
    denoise: Callable[[Tensor], Tensor], y: Tensor, n: Tensor, *, centered: bool
) -> GaussianPosterior:
    """What a denoiser knows besides the noisy positions.

    Parameters
    ----------
    denoise
        Estimate (1, N, D) of the clean positions from noisy ones of noise ``n``; called twice.
    y
        Noisy positions (1, N, D).
    n
        Their noise, ().
    centered
        Whether positions have zero mean.
    """
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    if centered:
        direction = center(direction)
    x = denoise(y)
    change = denoise(y + PROBE * n * direction) - x
    length = direction.square().sum().clamp_min(torch.finfo(y.dtype).eps)  # a single centered cell has no direction
    derivative = ((change * direction).sum() / (PROBE * n * length)).clamp(LOWEST, 1.0)
    return GaussianPosterior(
        precision=(1 - derivative) / (derivative * n**2),
        weighted_mean=(x / derivative - y) / n**2,
    )


WIDTHS = (0.5, 1.0, 2.0)
N_NEIGHBORS = 24
SCALE_RANK = 5
PRIOR_CELLS = 100  # known cells that count as much as the share over all genes
FEWEST = 20  # known cells below which nothing can be said


def krige(position: Tensor, known: Tensor, residual: Tensor) -> Tensor:
    """Expected residual of every cell.

    Parameters
    ----------
    position
        Positions (N, D).
    known
        Numbers (n,) of the known cells.
    residual
        Their residuals (n, G).

    Returns
    -------
    Tensor (N, G); 0 with fewer than 20 known cells.
    """
    if len(known) < FEWEST:
        return residual.new_zeros(len(position), residual.shape[1])
    points = position.double().cpu().numpy()
    tree = KDTree(points[known.cpu().numpy()])
    near = min(N_NEIGHBORS, len(known) - 1)
    loo_distance, loo_number = (value[:, 1:] for value in tree.query(tree.data, near + 1))
    distance, number = tree.query(points, near)
    best: tuple[float, float, Tensor] | None = None
    for width in WIDTHS:
        smooth = _average(loo_distance, loo_number, width, residual)
        share = _share(smooth, residual)
        error = float((residual - share * smooth).square().sum())
        if best is None or error < best[0]:
            best = error, width, share
    assert best is not None
    return best[2] * _average(distance, number, best[1], residual)


def _average(distance: np.ndarray, number: np.ndarray, width: float, value: Tensor) -> Tensor:
    """Weighted mean (M, G) of ``value`` (n, G) over the cells ``number`` (M, k) at ``distance`` (M, k)."""
    scale = np.maximum(distance[:, min(SCALE_RANK, distance.shape[1]) - 1 :][:, :1], np.finfo(float).tiny)
    weight = np.exp(-0.5 * (distance / (width * scale)) ** 2)
    weight = torch.from_numpy(weight / weight.sum(1, keepdims=True)).to(value)
    total = value.new_zeros(len(number), value.shape[1])
    for k in range(number.shape[1]):  # never (M, k, G)
        total += weight[:, k, None] * value[torch.from_numpy(number[:, k]).to(value.device)]
    return total


def _share(smooth: Tensor, residual: Tensor) -> Tensor:
    """Share a (G,) of the residual that its smooth part explains, between 0 and 1."""
    explained, power = (smooth * residual).sum(0), smooth.square().sum(0)
    pooled = (explained.sum() / power.sum().clamp_min(1e-12)).clamp(0, 1)
    own = torch.where(power > 0, explained / power.clamp_min(1e-12), pooled).clamp(0, 1)
    trust = len(residual) / (len(residual) + PRIOR_CELLS)
    return trust * own + (1 - trust) * pooled
