r"""What neighboring cells have in common beyond what their places explain.

.. math::

    \varepsilon_{ig} = \sqrt{1 - a_g}\; \xi_{ig} + \sqrt{\frac{a_g}{k + 1}} \sum_{j \in N_i \cup \{i\}} \zeta_{jg},
    \qquad \xi, \zeta \sim \mathcal N(0, 1)

is the noise that a draw of expression starts from, N_i being the k cells nearest to i. The noise of one cell is standard
normal whatever the shares a are, so that every cell alone is drawn as without them: a Gaussian copula over the cells.
Given their places the network draws cells that know little of each other; in tissue, cells that touch share a niche, and
transcripts leak from one to the next.

In a slice of N cells chance moves Moran's I of one draw by about :math:`\sqrt{2 / (k N)}`. It is kept out: over the cells
of a slice, the noise of every gene has mean 0, variance 1 and the Moran's I that it has on average, and is uncorrelated with
the mean of the slice, m, and with that of the neighbors, Wm. To second order Moran's I of a draw is then that of all draws
together.

The share of a gene is that with which samples at the places of the reference have Moran's I of the reference's own cells:

.. math:: a \leftarrow a + \frac{I^{true} - I(a)}{I(1) - I(0)}

starting from 0, see :func:`alphastomics.sampling._calibration.fit_dependence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

N_NEIGHBORS = 10
FEWEST = 100  # cells below which nothing is balanced: too much of the noise would go
TINY, LEAST_GAIN = 1e-12, 0.05


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dependence:
    """Shares of the noise that neighbors have in common.

    Parameters
    ----------
    share
        a of every gene, (G,), in [0, 1].
    """

    share: NDArray[np.float32]

    def fits(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shape is that of a tissue of so many genes and axes."""
        return self.share.shape == (n_genes,)

    def noise(self, around: Surroundings, generator: torch.Generator) -> Tensor:
        """Draw noise (N, G) of the cells of a slice."""
        near = around.near
        shape = len(near), len(self.share)
        own, seeds = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        field = seeds.clone()
        for rank in near.unbind(1):  # one at a time: (N, k, G) is too much for a large slice
            field += seeds[rank]
        field /= (near.shape[1] + 1) ** 0.5
        share = torch.from_numpy(self.share)
        if len(near) >= FEWEST:
            own, field, share = _balanced(own, field, share, around)
        return (1 - share).sqrt() * own + share.sqrt() * field


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Surroundings:
    """What the noise of a slice has to know of it.

    Parameters
    ----------
    near
        The nearest other cells of every cell, (N, k).
    given
        Columns (N, G) of mean 0, orthogonal to each other, with which the noise is not to be correlated.
    expected
        Moran's I that the shared part of the noise has on average; not computed for fewer than 100 cells.
    """

    near: Tensor
    given: tuple[Tensor, ...]
    expected: float

    @classmethod
    def of(cls, near: Tensor, mean: Tensor | None = None) -> Surroundings:
        """Those of cells with the neighbors ``near`` (N, k) and the mean expression ``mean`` (N, G), if that counts."""
        given: tuple[Tensor, ...] = ()
        if len(near) < FEWEST:
            return cls(near=near, given=given, expected=0.0)
        if mean is not None:
            centered = mean - mean.mean(0)
            given = (centered, _without(_lag(centered, near), [centered]))
        return cls(near=near, given=given, expected=_expected(near))


def _balanced(own: Tensor, field: Tensor, share: Tensor, around: Surroundings) -> tuple[Tensor, Tensor, Tensor]:
    """Both parts of the noise (N, G) without what chance put into them, and shares (G,) that give the Moran's I wanted.

    With parts that are uncorrelated, and uncorrelated with each other's neighbors, Moran's I is linear in the share.
    """
    near, given = around.near, around.given
    own = _without(own, given)
    own_lag = _without(_lag(own, near), [*given, own])
    field = _without(field, [*given, own, own_lag])
    own, field = (x / x.square().mean(0).clamp_min(TINY).sqrt() for x in (own, field))
    low, high = ((x * _lag(x, near)).mean(0) for x in (own, field))
    wanted = share * around.expected
    return own, field, ((wanted - low) / (high - low).clamp_min(LEAST_GAIN)).clamp(0, 1)


def _expected(near: Tensor) -> float:
    """Moran's I that the shared part has on average: of their k + 1 seeds, how many a cell and its neighbors share."""
    n, k = near.shape
    neighbors = sp.csr_array((np.ones(n * k), near.numpy().ravel(), np.arange(0, n * k + 1, k)), shape=(n, n))
    seeds = neighbors + sp.eye_array(n, format="csr")
    return float((seeds @ seeds.T).multiply(neighbors).sum() / (n * k * (k + 1)))


def _lag(x: Tensor, near: Tensor) -> Tensor:
    """What neighbors have of x (N, G), each pair counted from both sides: the gradient of Moran's I up to a factor."""
    total = torch.zeros_like(x)
    for rank in near.unbind(1):
        total += x[rank]
        total.index_add_(0, rank, x)
    return total / (2 * near.shape[1])


def _without(x: Tensor, given: Sequence[Tensor]) -> Tensor:
    """Take from x (N, G) its mean and its parts along ``given``, orthogonal columns of mean 0 of the same shape."""
    x = x - x.mean(0)
    for other in given:
        x = x - other * ((x * other).sum(0) / other.square().sum(0).clamp_min(TINY))
    return x
