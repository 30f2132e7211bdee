r"""Regression kriging: what known cells tell of the others beyond what the model made of them.

.. math::

    \delta_{ig} = a_g \sum_{j \in K} w_{ij}\, r_{jg}, \qquad
    r_{jg} = x_{jg} - m_{jg}, \qquad
    w_{ij} \propto \exp\!\Big(-\frac{\lVert p_i - p_j \rVert^2}{2 (h\, d_i)^2}\Big)

over the nearest known cells; m is the model's mean without cell j, :math:`d_i` the distance from i to its fifth known
cell. The width h and the share a of the residual of a gene that its neighbours explain are those of least squared error
where each known cell is left out; with few known cells a is drawn towards the share over all genes. A slice like those of
the reference leaves residuals that are noise, and a is 0; a specimen with a pattern of its own is followed.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.spatial import KDTree
from torch import Tensor

WIDTHS = (0.5, 1.0, 2.0)
N_NEIGHBOURS = 24
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
    near = min(N_NEIGHBOURS, len(known) - 1)
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
