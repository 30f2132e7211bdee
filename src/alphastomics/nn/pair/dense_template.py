r"""A given matrix of pair features, as the factors that are nearest to it.

.. math::

    T_t \approx \sum_{r=1}^{R} \sigma_{tr}\, u_{tr} v_{tr}^\top, \qquad
    p_{ijc} = \sum_t W_{ct} \sum_r (\sqrt{\sigma_{tr}}\, u_{itr}) (\sqrt{\sigma_{tr}}\, v_{jtr})

The truncated singular value decomposition is the best approximation of rank R (Eckart & Young 1936). The channels t of
the template have factors of their own, so the map W to the C channels of p is exact; the rank of p is R times their
number.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from alphastomics.nn.pair.dense import DensePairs
from alphastomics.nn.pair.factors import PairFactors, upcast

MOST_CELLS = 2048  # a decomposition takes O(N^3)


@torch.no_grad()
def factorise(values: Tensor, rank: int, mask: Tensor | None = None) -> PairFactors:
    """Factors of rank R nearest to ``values`` (B, N, N, C), without a gradient, which would not be finite.

    Raises
    ------
    ValueError
        If there are more than 2048 cells, or fewer than R.
    """
    n = values.shape[1]
    if n > MOST_CELLS:
        raise ValueError(f"a matrix of {n} cells is too large to factorise; Template makes factors of positions")
    if rank > n:
        raise ValueError(f"rank={rank} is more than the {n} cells of the matrix")
    matrices = upcast(DensePairs.masked(values, mask).values).permute(0, 3, 1, 2)
    u, sigma, vt = torch.linalg.svd(matrices, full_matrices=False)
    root = sigma[..., None, :rank].sqrt()
    return PairFactors.masked(u[..., :rank] * root, vt.mT[..., :rank] * root, mask)


class DenseTemplate(nn.Module):
    """A template of all pairs, such as measured distances or contacts, to factors.

    Parameters
    ----------
    n_templates
        Channels of the template.
    n_channels
        C.
    rank
        R, of each channel of the template.
    """

    def __init__(self, n_templates: int, n_channels: int, *, rank: int) -> None:
        super().__init__()
        self.rank, self.per_template = rank * n_templates, rank
        self.weight = nn.Parameter(n_templates**-0.5 * torch.randn(n_channels, n_templates))

    def forward(self, template: Tensor, mask: Tensor | None = None) -> PairFactors:
        """``template`` (B, N, N, T), at most 2048 cells, to factors (B, C, N, R T)."""
        factors = factorise(template, self.per_template, mask)
        left = factors.left.transpose(1, 2).flatten(-2)[:, None]  # (B, 1, N, T R)
        right = factors.right.transpose(1, 2)[:, None] * self.weight[:, None, :, None]  # (B, C, N, T, R)
        right = right.flatten(-2)
        return PairFactors(left.expand_as(right), right, mask)
