r"""Adding an update :math:`\Delta = \Delta_L \Delta_R^\top` to factors without a larger rank.

The sum p + Delta has rank 2R. Three ways back to R, by name:

``"mix"``: either side is a learned combination of its own ranks and those of the update, at first the identity and zero,

.. math:: L' = L\,(I + W_0) + \Delta_L W_1, \qquad R' = R\,(I + V_0) + \Delta_R V_1,

which moves the factors and is no approximation of p + Delta.

``"tangent"``: p takes a step along the matrices of rank R, on to which the update is projected (Koch & Lubich 2007),

.. math::

    L' = L + D R\,(R^\top R + \lambda)^{-1}, \qquad
    R' = R + (I - P_R)\, D^\top L\,(L^\top L + \lambda)^{-1}, \qquad D = \tau\,\Delta,

with :math:`P_R = R (R^\top R + \lambda)^{-1} R^\top` and a learned step :math:`\tau_c` that starts at zero. To first
order in the step it is the best approximation of p + D of rank R; only R x R systems are solved.

``"distribute"``: the update is summed over its ranks and both sides, and all ranks of both sides get the same share,

.. math:: L'_r = L_r + \tfrac1R s, \qquad R'_r = R_r + \tfrac1R s, \qquad s = \sum_q \Delta_{L,q} + \Delta_{R,q} .

It uses one rank of the update and pulls both sides towards each other; it is here for comparison.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from alphastomics.nn.pair.factors import PairFactors, divide_by_gram, gram, upcast

ResidualKind = Literal["mix", "tangent", "distribute"]


class RankMix(nn.Module):
    """``"mix"``. Its weights are for ``max_rank`` ranks; fewer ranks use the first."""

    def __init__(self, max_rank: int) -> None:
        super().__init__()
        self.keep = nn.Parameter(torch.zeros(2, max_rank, max_rank))
        self.take = nn.Parameter(torch.zeros(2, max_rank, max_rank))

    def forward(self, pair: PairFactors, update: PairFactors) -> PairFactors:
        """Factors with the ``update`` mixed in."""
        keep, take = self.keep[:, : pair.rank, : pair.rank], self.take[:, : update.rank, : pair.rank]
        left = pair.left + pair.left @ keep[0] + update.left @ take[0]
        right = pair.right + pair.right @ keep[1] + update.right @ take[1]
        return PairFactors(left, right, pair.mask)


class TangentStep(nn.Module):
    """``"tangent"``, with one step per channel."""

    RIDGE = 1e-4  # lambda over the mean eigenvalue of a Gram matrix

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.zeros(n_channels))

    def forward(self, pair: PairFactors, update: PairFactors) -> PairFactors:
        """Factors after a step along the ``update``."""
        with torch.autocast(pair.left.device.type, enabled=False):
            left, right, d_left, d_right = (upcast(x) for x in (*pair[:2], *update[:2]))
            d_left = self.step[:, None, None] * d_left
            on_right = divide_by_gram(gram(d_right, right), right, ridge=self.RIDGE)  # D R (R^T R)^-1 = d_left on_right
            on_left = divide_by_gram(gram(d_left, left), left, ridge=self.RIDGE)
            twice = on_right.mT @ on_left  # what both sides would add
            new_left, new_right = left + d_left @ on_right, right + d_right @ on_left - right @ twice
        dtype = pair.left.dtype
        return PairFactors(new_left.to(dtype), new_right.to(dtype), pair.mask)


class Distribute(nn.Module):
    """``"distribute"``."""

    def forward(self, pair: PairFactors, update: PairFactors) -> PairFactors:
        """Factors with the same vector of each cell added to all ranks."""
        share = (update.left + update.right).sum(dim=-1, keepdim=True) / pair.rank
        return PairFactors(pair.left + share, pair.right + share, pair.mask)


def make_residual(kind: ResidualKind, n_channels: int, max_rank: int) -> RankMix | TangentStep | Distribute:
    """Make a residual by name.

    Raises
    ------
    ValueError
        If the kind is unknown.
    """
    if kind == "mix":
        return RankMix(max_rank)
    if kind == "tangent":
        return TangentStep(n_channels)
    if kind == "distribute":
        return Distribute()
    raise ValueError(f"residual={kind!r} is unknown; choose 'mix', 'tangent' or 'distribute'")
