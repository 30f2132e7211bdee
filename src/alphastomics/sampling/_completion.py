r"""Correction of the estimated expression by observed values: kriging over space, and exemplars.

**Regression kriging**, from cells with observed expression to the others:

.. math::

    \delta_{ig} = a_g \sum_{j \in K} w_{ij}\, r_{jg}, \qquad
    r_{jg} = x_{jg} - m_{jg}, \qquad
    w_{ij} \propto \exp\!\Big(-\frac{\lVert p_i - p_j \rVert^2}{2 (h\, d_i)^2}\Big)

over the nearest observed cells; m is the mean of the network without cell j, :math:`d_i` the distance from i to its fifth
observed cell. The width h and the share a of the residual of a gene that its neighbors explain minimize the squared error with
each observed cell left out; with few observed cells a is shrunken towards the share over all genes. In a slice like those of
the reference the residuals are noise and a is 0; a is positive where the expression of a specimen differs from the reference.

**Exemplars**, for cells of which some genes are observed:

.. math::

    \delta_{ig} = a\, \Big(\frac1k \sum_{j \in N_i} x_{jg} - m_{ig}\Big), \qquad
    s_i = (W_i^\top W_i + \sigma^2 I)^{-1}\, W_i^\top x_i

:math:`N_i` are the k exemplars (stored reference cells) whose principal components are nearest to those of cell i. The
components s are estimated from its observed genes: W are the scaled components, :math:`W_i` their rows of observed genes,
:math:`\sigma^2` the variance that the components leave (Tipping & Bishop 1999, J. R. Stat. Soc. B 61:611). The share a
minimizes the squared error over observed values that were left out. A network after a short training smooths over rare
states, which exemplars preserve, so that the errors of the two differ (Khandelwal et al. 2020, ICLR, for language).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from scipy.spatial import KDTree
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors
from sklearn.utils import gen_batches

from alphastomics.metrics._neighbors import without_itself

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

WIDTHS = (0.5, 1.0, 2.0)
KRIGING_NEIGHBORS = 24
SCALE_RANK = 5
PRIOR_CELLS = 100  # observed cells that count as much as the share over all genes
MIN_CELLS = 20  # observed cells below which nothing is estimated
N_COMPONENTS = 32
N_NEIGHBORS = 50
CHUNK = 2048  # cells whose components are solved for at once


def krige(position: Tensor, observed: Tensor, residual: Tensor) -> Tensor:
    """Expected residual (N, G) at positions (N, D), given that of the ``observed`` cells (n,), (n, G); 0 with fewer than 20."""
    if len(observed) < MIN_CELLS:
        return residual.new_zeros(len(position), residual.shape[1])
    points = position.cpu().double().numpy()
    tree = KDTree(points[observed.cpu().numpy()])
    n_neighbors = min(KRIGING_NEIGHBORS, len(observed) - 1)
    loo_distance, loo_number = without_itself(*tree.query(tree.data, n_neighbors + 1))
    distance, number = tree.query(points, n_neighbors)
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
    """Weighted mean (M, G) of ``value`` (n, G) over cells of index ``number`` (M, k) at ``distance`` (M, k)."""
    scale = np.maximum(distance[:, min(SCALE_RANK, distance.shape[1]) - 1 :][:, :1], np.finfo(float).tiny)
    weight = np.exp(-0.5 * (distance / (width * scale)) ** 2)
    weight = torch.from_numpy(weight / weight.sum(1, keepdims=True)).to(value)
    total = value.new_zeros(len(number), value.shape[1])
    for k in range(number.shape[1]):  # never (M, k, G)
        total += weight[:, k, None] * value[torch.from_numpy(number[:, k]).to(value.device)]
    return total


def _share(smooth: Tensor, residual: Tensor) -> Tensor:
    """Share a (G,) of the residual that its smooth part explains, between 0 and 1."""
    product, power = (smooth * residual).sum(0), smooth.square().sum(0)
    pooled = (product.sum() / power.sum().clamp_min(1e-12)).clamp(0, 1)
    share = torch.where(power > 0, product / power.clamp_min(1e-12), pooled).clamp(0, 1)
    weight = len(residual) / (len(residual) + PRIOR_CELLS)
    return weight * share + (1 - weight) * pooled


class _Components(NamedTuple):
    """The scaled components W (G, K), their scales (K,), the mean (G,), and the residual variance."""

    loadings: NDArray[np.floating]
    scale: NDArray[np.floating]
    mean: NDArray[np.floating]
    noise: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Exemplars:
    """Expression (M, G) of reference cells in network units, from which partly observed cells are completed."""

    expression: NDArray[np.float32]

    @cached_property
    def _components(self) -> _Components:
        # In single precision the solution depends on the order of the sums where the components leave almost no variance.
        pca = PCA(min(N_COMPONENTS, *self.expression.shape), random_state=0).fit(self.expression.astype(np.float64))
        noise = max(float(pca.noise_variance_), 1e-6)
        scale = np.sqrt(np.maximum(pca.explained_variance_ - noise, 0.0))
        return _Components((pca.components_ * scale[:, None]).T, scale, pca.mean_, noise)

    def nearest_mean(self, value: NDArray[np.float32], observed: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Mean expression (N, G) of the exemplars nearest to cells with the ``observed`` entries of ``value``, both (N, G)."""
        loadings, scale, mean, noise = self._components
        # Exemplars use only genes that are observed in some cell, so that both scores are shrunken equally.
        used = np.atleast_2d(observed.any(axis=0))
        exemplars = _scores(self.expression - mean, used, loadings, noise) * scale
        cells = _scores(value - mean, observed, loadings, noise) * scale
        k = min(N_NEIGHBORS, len(exemplars))
        neighbors = NearestNeighbors(n_neighbors=k, algorithm="brute").fit(exemplars).kneighbors(cells)[1]
        total = np.zeros(value.shape)
        for rank in neighbors.T:  # never (N, k, G)
            total += self.expression[rank]
        return (total / k).astype(np.float32)


def _scores(
    x: NDArray[np.floating], observed: NDArray[np.bool_], loadings: NDArray[np.floating], noise: float
) -> NDArray[np.floating]:
    """Posterior mean s (N, K) given the observed values of ``x`` (N, G); ``observed`` is (N, G), or (1, G) for all cells."""
    n_genes, k = loadings.shape
    projected = np.where(observed, x, 0.0) @ loadings
    prior = noise * np.eye(k)
    if len(observed) == 1:
        return np.linalg.solve((loadings * observed.T).T @ loadings + prior, projected.T).T
    outer = (loadings[:, :, None] * loadings[:, None, :]).reshape(n_genes, k * k)
    solved = [
        np.linalg.solve((observed[rows] @ outer).reshape(-1, k, k) + prior, projected[rows][..., None])[..., 0]
        for rows in gen_batches(len(x), CHUNK)
    ]
    return np.concatenate(solved)
