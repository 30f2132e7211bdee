r"""Samples of expression with the statistics of the reference: marginals, dependence of neighbors, standard deviation.

**Marginals.** A sampled value is mapped to the same quantile of the reference,

.. math:: x_{ig} \leftarrow Q_g\big(F_g(x_{ig})\big)

with :math:`Q_g` the quantile function of gene g in the reference and :math:`F_g` the distribution of samples of the trained
model at the positions of the same cells. The map is monotone: it preserves the order of the cells, and a query that differs
from the reference keeps its difference. It restores counts, above all the many zeros, which a few Gaussian steps smooth away.

**Dependence.** The noise from which a draw of expression starts is

.. math::

    \varepsilon_{ig} = \sqrt{1 - a_g}\; \xi_{ig} + \sqrt{\frac{a_g}{k + 1}} \sum_{j \in N_i \cup \{i\}} \zeta_{jg},
    \qquad \xi, \zeta \sim \mathcal N(0, 1)

with :math:`N_i` the k cells nearest to i. The noise of one cell is standard normal for any share a, so that the distribution
of every single cell is unchanged: a Gaussian copula over the cells. Given their positions the network samples cells nearly
independently; in tissue, adjacent cells share a niche, and transcripts leak from one to the next.

In a slice of N cells chance moves Moran's I of one draw by about :math:`\sqrt{2 / (k N)}`. This is removed: over the cells of
a slice, the noise of every gene has mean 0, variance 1 and its expected Moran's I, and is uncorrelated with the mean of the
slice, m, and with that of the neighbors, Wm. To second order Moran's I of a draw is then that of all draws together.

The share of a gene is the one with which samples at the positions of the reference have Moran's I of the reference's cells:

.. math:: a \leftarrow a + \frac{I^{true} - I(a)}{I(1) - I(0)}

starting from 0, see :func:`alphastomics.sampling._fit_expression.fit_dependence`.

**Standard deviation**, from a few draws of each value:

.. math::

    s_{ig}^2 = (1 - w)\, V_g(m_{ig}) + w\, v_{ig}, \qquad V_g(m) = a_g + b_g m + c_g m^2

v is the variance over the draws of one value and m the mean that is returned for it. Where most counts are zero, eight draws
of a value are often all zero, and v alone hardly ranks the errors of values. The variance of counts is a function of their
mean (Poisson and negative binomial are cases of V, with a = 0), which is estimated from all cells of a slice together. For
expression that is not counts b and c are 0.

The difference v - V of a value counts as far as it is reproduced: with :math:`\rho` the correlation over cells of
:math:`v - V` between two halves of the draws, mean over genes, and n the number of such halves in all draws,

.. math:: w = \frac{n \rho}{1 + (n - 1) \rho}

is the reliability of v - V (Spearman-Brown), with which the best linear estimate shrinks it. Variances that share
information among many were introduced for genes by :cite:t:`smyth2004`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp
import torch
from scipy.optimize import nnls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray
    from torch import Tensor

N_NEIGHBORS = 10  # k
MIN_CELLS = 100  # cells below which noise is not balanced: too much of it would be removed
EPSILON = 1e-12  # against division by 0
MIN_GAIN = 0.05  # of Moran's I from shared noise, below which a share has almost no effect
LEVELS = np.unique(np.concatenate([np.linspace(0, 1, 65), 1 - np.logspace(-3, -1.5, 12)]))
"""Levels of the quantiles, finer at the top, where the cells are that express a gene."""


def quantiles(x: ArrayLike) -> NDArray[np.float32]:
    """Quantiles (K, G) of values (N, G)."""
    return np.quantile(np.asarray(x, dtype=np.float64), LEVELS, axis=0).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Marginals:
    """Quantiles of every gene, of samples and of cells: (K, G) in network units, ascending along K."""

    sampled: NDArray[np.float32]
    true: NDArray[np.float32]

    def is_valid(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shapes match the number of genes."""
        return self.sampled.shape == self.true.shape == (len(LEVELS), n_genes)

    def apply(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map values (N, G) that the model sampled."""
        columns = [np.interp(x[:, g], self.sampled[:, g], self.true[:, g]) for g in range(x.shape[1])]
        return np.stack(columns, axis=1).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dependence:
    """Share a of the noise of every gene, (G,) in [0, 1], that neighbors have in common."""

    share: NDArray[np.float32]

    def is_valid(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shape matches the number of genes."""
        return self.share.shape == (n_genes,)

    def noise(self, neighborhood: Neighborhood, generator: torch.Generator) -> Tensor:
        """Draw noise (N, G) of the cells of a slice."""
        neighbors = neighborhood.neighbors
        shape = len(neighbors), len(self.share)
        independent, seeds = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        field = seeds.clone()
        for rank in neighbors.unbind(1):  # one at a time: (N, k, G) is too much for a large slice
            field += seeds[rank]
        field /= (neighbors.shape[1] + 1) ** 0.5
        share = torch.from_numpy(self.share)
        if len(neighbors) >= MIN_CELLS:
            independent, field, share = _balance(independent, field, share, neighborhood)
        return (1 - share).sqrt() * independent + share.sqrt() * field


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Neighborhood:
    """Neighbors of the cells of a slice, and moments that correlated noise must match.

    Parameters
    ----------
    neighbors
        The nearest other cells of every cell, (N, k).
    basis
        Columns (N, G) of mean 0, orthogonal to each other, with which the noise is not to be correlated.
    expected
        Moran's I that the shared part of the noise has on average; not computed for fewer than 100 cells.
    """

    neighbors: Tensor
    basis: tuple[Tensor, ...]
    expected: float

    @classmethod
    def from_neighbors(cls, neighbors: Tensor, mean: Tensor | None = None) -> Neighborhood:
        """From ``neighbors`` (N, k) of the cells and their mean expression ``mean`` (N, G), if there is one."""
        basis: tuple[Tensor, ...] = ()
        if len(neighbors) < MIN_CELLS:
            return cls(neighbors=neighbors, basis=basis, expected=0.0)
        if mean is not None:
            centered = mean - mean.mean(0)
            basis = (centered, _project_out(_spatial_lag(centered, neighbors), [centered]))
        return cls(neighbors=neighbors, basis=basis, expected=_expected_moran(neighbors))


def _balance(
    independent: Tensor, field: Tensor, share: Tensor, neighborhood: Neighborhood
) -> tuple[Tensor, Tensor, Tensor]:
    """Both parts of the noise (N, G) without sampling error, and the shares (G,) that give the expected Moran's I.

    With parts that are uncorrelated, and uncorrelated with each other's neighbors, Moran's I is linear in the share.
    """
    neighbors, basis = neighborhood.neighbors, neighborhood.basis
    independent = _project_out(independent, basis)
    independent_lag = _project_out(_spatial_lag(independent, neighbors), [*basis, independent])
    field = _project_out(field, [*basis, independent, independent_lag])
    independent, field = (x / x.square().mean(0).clamp_min(EPSILON).sqrt() for x in (independent, field))
    low, high = ((x * _spatial_lag(x, neighbors)).mean(0) for x in (independent, field))
    target = share * neighborhood.expected
    return independent, field, ((target - low) / (high - low).clamp_min(MIN_GAIN)).clamp(0, 1)


def _expected_moran(neighbors: Tensor) -> float:
    """Expected Moran's I of the shared part: the share of the k + 1 seeds that a cell and a neighbor have in common."""
    n, k = neighbors.shape
    adjacency = sp.csr_array((np.ones(n * k), neighbors.numpy().ravel(), np.arange(0, n * k + 1, k)), shape=(n, n))
    seeds = adjacency + sp.eye_array(n, format="csr")
    return float((seeds @ seeds.T).multiply(adjacency).sum() / (n * k * (k + 1)))


def _spatial_lag(x: Tensor, neighbors: Tensor) -> Tensor:
    """Mean of x (N, G) over neighbors, each pair counted from both sides: the gradient of Moran's I up to a factor."""
    total = torch.zeros_like(x)
    for rank in neighbors.unbind(1):
        total += x[rank]
        total.index_add_(0, rank, x)
    return total / (2 * neighbors.shape[1])


def _project_out(x: Tensor, basis: Sequence[Tensor]) -> Tensor:
    """Remove from x (N, G) its mean and its components along ``basis``, orthogonal columns of mean 0 of the same shape."""
    x = x - x.mean(0)
    for other in basis:
        x = x - other * ((x * other).sum(0) / other.square().sum(0).clamp_min(EPSILON))
    return x


def pooled_sd(
    draws: NDArray[np.float32], mean: NDArray[np.float32], sampled: NDArray[np.bool_] | None = None, *, counts: bool
) -> NDArray[np.float32]:
    """Standard deviation (N, G) of expression in one slice, from draws (K, N, G) and their mean (N, G).

    It is NaN for a single draw, and 0 for values that are not ``sampled`` (N, G). With ``counts`` the variance depends on
    the mean.
    """
    sampled = np.ones(mean.shape, dtype=bool) if sampled is None else sampled
    if len(draws) == 1:
        return np.where(sampled, np.float32(np.nan), np.float32(0))
    variance = _variance(draws)
    trend = np.zeros_like(variance)
    for gene in range(mean.shape[1]):
        rows = sampled[:, gene]
        if rows.any():
            trend[rows, gene] = _trend(variance[rows, gene], mean[rows, gene].astype(np.float64), counts=counts)
    w = _reliability(draws, trend, sampled)
    return np.where(sampled, np.sqrt((1 - w) * trend + w * variance), 0).astype(np.float32)


def _variance(draws: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.var(draws, axis=0, dtype=np.float64, ddof=1)


def _trend(variance: NDArray[np.float64], mean: NDArray[np.float64], *, counts: bool) -> NDArray[np.float64]:
    """V (N,) of one gene by non-negative least squares, weighted by the inverse mean because counts scatter with it."""
    if not counts:
        return np.full_like(variance, variance.mean())
    basis = np.stack([np.ones_like(mean), mean, mean**2], axis=1)
    weight = 1 / (mean + max(mean.mean(), EPSILON))
    return basis @ nnls(weight[:, None] * basis, weight * variance)[0]


def _reliability(draws: NDArray[np.float32], trend: NDArray[np.float64], sampled: NDArray[np.bool_]) -> float:
    """w, the share of variance - trend that other draws would reproduce; 0 for fewer than four draws."""
    half = len(draws) // 2
    if half < 2:
        return 0.0
    first, second = (np.where(sampled, _variance(part) - trend, 0) for part in (draws[:half], draws[half : 2 * half]))
    n_cells = np.maximum(sampled.sum(0), 1)
    first, second = (np.where(sampled, x - x.sum(0) / n_cells, 0) for x in (first, second))
    norm = np.sqrt((first**2).sum(0) * (second**2).sum(0))
    varies = norm > 0
    if not varies.any():
        return 0.0
    rho = max(0.0, float(((first * second).sum(0)[varies] / norm[varies]).mean()))
    n = len(draws) / half
    return n * rho / (1 + (n - 1) * rho)
