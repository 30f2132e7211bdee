r"""Positions that are conditioned on known ones: kriging over the embedding of the cells, with their mean as the trend.

.. math::

    y_i = m_i + k_i^\top (K + \lambda I)^{-1} (x - m)_{\mathcal N_i}, \qquad m_i = \bar x + \beta\,(\hat x_i - \bar x), \qquad
    k(h, h') = \exp\!\Big(-\frac{\lVert h - h' \rVert^2}{2 \ell^2}\Big)

:math:`\hat x` is the conditional mean of the positions, or a draw, x are the known positions, :math:`\bar x` is their center, and
:math:`\mathcal N_i` are the known cells nearest to cell i in the standardized embedding h: a nearest-neighbor Gaussian process
(Datta et al. 2016, J. Am. Stat. Assoc. 111:800) with an external drift. Cells that resemble each other are displaced together. A draw
of the prior plus the kriged residual is a draw of the posterior (Journel & Huijbregts 1978, Mining Geostatistics).

:math:`\ell`, :math:`\lambda` and :math:`\beta` minimize the squared error of known cells, each predicted from the others. Kriging is
linear: with the errors :math:`e` of :math:`x - \bar x` and :math:`f` of :math:`\hat x - \bar x`, that of y is

.. math:: \lVert e - \beta f \rVert^2, \qquad \beta = \frac{\langle e, f \rangle}{\lVert f \rVert^2} \text{, at least 0 and at most 1.}

Its ratio to :math:`\lVert x - \bar x \rVert^2` is the share of the variance that is not explained, :math:`1 - R^2`.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from alphastomics.sampling._cells import evenly_spaced_indices

if TYPE_CHECKING:
    from torch import Tensor

N_NEIGHBORS = 64
WIDTHS, NOISES = (0.5, 1.0, 2.0, 4.0), (0.03, 0.1, 0.3, 1.0)  # l in units of the distance of neighbors, and lambda
ROWS = 2048  # cells that are predicted at once
LEFT_OUT = 2048  # known cells that are predicted from the others
MIN_CELLS = 5  # known cells below which nothing is estimated


class Kriged(NamedTuple):
    """Expected positions (N, D), and the share of their variance that is not explained; 1 if too few cells are known."""

    position: Tensor
    unexplained: float


def krige_positions(embedding: Tensor, mean: Tensor, known: Tensor, position: Tensor) -> Kriged:
    """Expected positions of cells with ``embedding`` (N, d) and ``mean`` (N, D), given those of the ``known`` cells.

    ``known`` (n,) are indices of cells, and ``position`` (n, D) their positions.
    """
    if len(known) < MIN_CELLS:
        return Kriged(mean, 1.0)
    origin = position.mean(0)
    offset = mean - origin
    value = torch.cat([position - origin, offset[known]], dim=1)
    h = (embedding - embedding.mean(0)) / embedding.std(0).clamp_min(1e-6)
    h_known = h[known]
    unexplained, width, noise, drift = _fit(h_known, value)
    predicted = [_predict(_nearest(rows, h_known), value, width, noise) for rows in h.split(ROWS)]
    kriged, trend = torch.cat(predicted).chunk(2, dim=1)
    return Kriged(origin + kriged + drift * (offset - trend), min(unexplained, 1.0))


class _Neighbors(NamedTuple):
    """Known cells nearest to M cells: indices (M, k), and distances to them (M, k) and between them (M, k, k)."""

    indices: Tensor
    distance: Tensor
    between: Tensor


def _nearest(h: Tensor, known: Tensor, itself: Tensor | None = None) -> _Neighbors:
    """Known cells (n, d) nearest to cells ``h`` (M, d), without the cell ``itself``, if the index (M,) is given."""
    distance, n_others = torch.cdist(h, known), len(known)
    if itself is not None:
        distance.scatter_(1, itself[:, None], torch.inf)
        n_others -= 1
    nearest = distance.topk(min(N_NEIGHBORS, n_others), dim=1, largest=False)
    near = known[nearest.indices]
    return _Neighbors(nearest.indices, nearest.values, torch.cdist(near, near))


def _fit(known: Tensor, value: Tensor) -> tuple[float, float, float, Tensor]:
    """Unexplained share, and width, noise and drift that minimize it; ``value`` (n, 2 D) are positions and means."""
    left_out = torch.from_numpy(evenly_spaced_indices(len(known), LEFT_OUT)).to(known.device)
    others = _nearest(known[left_out], known, left_out)
    scale = max(float(others.distance.mean()), 1e-6)  # 0 for cells with the same embedding
    tiny, fits = torch.finfo(value.dtype).tiny, []
    total = value[left_out].chunk(2, dim=1)[0].square().sum().clamp_min(tiny)  # 0 for cells at one position
    for width, noise in product(WIDTHS, NOISES):
        error, of_mean = (value[left_out] - _predict(others, value, width * scale, noise)).chunk(2, dim=1)
        power = of_mean.square().sum().clamp_min(tiny)  # 0 for cells with the same mean
        drift = ((error * of_mean).sum() / power).clamp(0, 1)
        fits.append((float((error - drift * of_mean).square().sum() / total), width * scale, noise, drift))
    return min(fits)


def _predict(neighbors: _Neighbors, value: Tensor, width: float, noise: float) -> Tensor:
    """Values predicted (M, V) from those of the known cells (n, V)."""
    covariance = _kernel(neighbors.between, width)
    covariance.diagonal(dim1=1, dim2=2).add_(noise)
    weight = torch.linalg.solve(covariance, _kernel(neighbors.distance, width)[..., None])
    return (weight * value[neighbors.indices]).sum(1)


def _kernel(distance: Tensor, width: float) -> Tensor:
    return torch.exp(distance.square() / (-2 * width**2))
