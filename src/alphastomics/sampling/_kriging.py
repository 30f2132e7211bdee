r"""Positions that are conditioned on known ones: kriging over the embedding of the cells, with their mean as the trend.

.. math::

    y_i = m_i + k_i^\top (K + \lambda I)^{-1} (x - m)_{\mathcal N_i}, \qquad m_i = \bar x + \beta\,(\hat x_i - \bar x), \qquad
    k(h, h') = \exp\!\Big(-\frac{\lVert h - h' \rVert^2}{2 \ell^2}\Big)

:math:`\hat x` is the conditional mean of the positions, or a draw, x are the known positions, :math:`\bar x` is their center, and
:math:`\mathcal N_i` are the known cells nearest to cell i in the embedding h: a nearest-neighbor Gaussian process (Datta et al. 2016,
J. Am. Stat. Assoc. 111:800) with an external drift. Cells that resemble each other are displaced together. :math:`\ell`,
:math:`\lambda` and :math:`\beta` minimize the squared error of known cells, each predicted from the others. A draw of the prior plus
the kriged residual is a draw of the posterior (Journel & Huijbregts 1978, Mining Geostatistics).
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

N_NEIGHBORS = 64
WIDTHS, NOISES = (0.5, 1.0, 2.0, 4.0), (0.03, 0.1, 0.3, 1.0)  # l in units of the distance of neighbors, and lambda
DRIFTS = (1.0, 0.5)  # beta
ROWS = 2048  # cells that are predicted at once
LEFT_OUT = 2048  # known cells that are predicted from the others
MIN_CELLS = 5  # known cells below which nothing is estimated


def krige_positions(embedding: Tensor, mean: Tensor, known: Tensor, position: Tensor) -> Tensor:
    """Expected positions (N, D) of cells with ``embedding`` (N, d) and ``mean`` (N, D), given those of the ``known`` cells.

    ``known`` (n,) are indices of cells, and ``position`` (n, D) their positions.
    """
    if len(known) < MIN_CELLS:
        return mean
    origin, errors, results = position.mean(0), [], []
    for drift in DRIFTS:
        trend = origin + drift * (mean - origin)
        residual, error = krige_residual(embedding, known, position - trend[known])
        errors.append(error)
        results.append(trend + residual)
    return results[errors.index(min(errors))]


def krige_residual(embedding: Tensor, known: Tensor, residual: Tensor) -> tuple[Tensor, float]:
    """Expected residual (N, D), given that of the ``known`` cells (n, D), and the squared error of known cells left out."""
    if len(known) < MIN_CELLS:
        return residual.new_zeros(len(embedding), residual.shape[1]), float(residual.square().sum())
    h = (embedding - embedding.mean(0)) / embedding.std(0).clamp_min(1e-6)
    left_out = torch.linspace(0, len(known) - 1, min(LEFT_OUT, len(known))).long().to(known.device)
    distance, number = _nearest_known(h[known[left_out]], h[known], min(N_NEIGHBORS + 1, len(known)))
    others = distance[:, 1:], number[:, 1:]  # the nearest one is the cell itself
    scale = max(float(others[0].mean()), 1e-6)  # 0 for cells with the same embedding

    def error(width: float, noise: float) -> float:
        return float((_predict(h[known], *others, residual, width * scale, noise) - residual[left_out]).square().sum())

    least, width, noise = min((error(width, noise), width * scale, noise) for width, noise in product(WIDTHS, NOISES))
    k = min(N_NEIGHBORS, len(known))
    parts = [_predict(h[known], *_nearest_known(rows, h[known], k), residual, width, noise) for rows in h.split(ROWS)]
    return torch.cat(parts), least


def _nearest_known(h: Tensor, known: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances and numbers (M, k) of the ``known`` cells (n, d) nearest to cells ``h`` (M, d)."""
    parts = [torch.cdist(rows, known).topk(k, dim=1, largest=False) for rows in h.split(ROWS)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


def _predict(known: Tensor, distance: Tensor, number: Tensor, residual: Tensor, width: float, noise: float) -> Tensor:
    """Predicted residual (M, D) from the known cells ``number`` (M, k) at ``distance`` (M, k) in the embedding."""
    parts = []
    for d, j in zip(distance.split(ROWS), number.split(ROWS), strict=True):
        near = known[j]
        covariance = torch.exp(torch.cdist(near, near).square_() / (-2 * width**2))
        covariance.diagonal(dim1=1, dim2=2).add_(noise)
        weight = torch.linalg.solve(covariance, torch.exp(d.square() / (-2 * width**2))[..., None])
        parts.append((weight * residual[j]).sum(1))
    return torch.cat(parts)
