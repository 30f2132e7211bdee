r"""Updates of pair features that keep the rank of the factors: residuals and dropout.

**Residuals.** The sum of p and an update :math:`\Delta = \Delta_L \Delta_R^\top` has rank 2R. Three residuals keep the rank R:

``"mix"``: each side is a learned combination of its own ranks (initially the identity) and those of the update (initially zero),

.. math:: L' = L\,(I + W_0) + \Delta_L W_1, \qquad R' = R\,(I + V_0) + \Delta_R V_1 .

It acts on the factors and does not approximate :math:`p + \Delta`.

``"tangent"``: a step along the tangent space of the matrices of rank R, onto which the update is projected (Koch & Lubich 2007),

.. math::

    L' = L + D R\,(R^\top R + \lambda)^{-1}, \qquad
    R' = R + (I - P_R)\, D^\top L\,(L^\top L + \lambda)^{-1}, \qquad D = \tau\,\Delta,

with :math:`P_R = R (R^\top R + \lambda)^{-1} R^\top` and a learned step :math:`\tau_c`, initially zero. To first
order in the step it is the best approximation of p + D of rank R; only R x R systems are solved.

``"distribute"``: the update is summed over its ranks and both sides, and an equal share is added to all ranks of both sides,

.. math:: L'_r = L_r + \tfrac1R s, \qquad R'_r = R_r + \tfrac1R s, \qquad s = \sum_q \Delta_{L,q} + \Delta_{R,q} .

It retains one rank of the update and makes both sides more similar; it is a baseline.

**Dropout** of whole rows or columns (Jumper et al. 2021, section 1.11.6) is exact, a product with one side of the factors,

.. math:: p'_{ijc} = m_{jc}\, p_{ijc} \;\; \text{(row)}, \qquad p'_{ijc} = m_{ic}\, p_{ijc} \;\; \text{(column)}

with independent :math:`m = \text{Bernoulli}(1 - \rho) / (1 - \rho)` for each context: ``"row"`` shares the draw over the
rows i of a context, ``"column"`` over its columns j.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from alphastomics.nn.pair.factors import PairFactors, divide_by_gram, gram, upcast
from alphastomics.nn.random import Dropout

if TYPE_CHECKING:
    from alphastomics.config import PairResidual

SharedOver = Literal["row", "column"]


class RankMix(nn.Module):
    """Residual ``"mix"``, with weights for ``max_rank`` ranks; smaller ranks use the first weights."""

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
    """Residual ``"tangent"``, with one learned step per channel."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.zeros(n_channels))

    def forward(self, pair: PairFactors, update: PairFactors) -> PairFactors:
        """Factors after a step along the ``update``."""
        with torch.autocast(pair.left.device.type, enabled=False):
            left, right, d_left, d_right = (upcast(x) for x in (*pair[:2], *update[:2]))
            d_left = self.step[:, None, None] * d_left
            on_right = divide_by_gram(gram(d_right, right), right)  # D R (R^T R)^-1 = d_left on_right
            on_left = divide_by_gram(gram(d_left, left), left)
            twice = on_right.mT @ on_left  # contained in the steps of both sides
            new_left, new_right = left + d_left @ on_right, right + d_right @ on_left - right @ twice
        dtype = pair.left.dtype
        return PairFactors(new_left.to(dtype), new_right.to(dtype), pair.mask)


class Distribute(nn.Module):
    """Residual ``"distribute"``."""

    def forward(self, pair: PairFactors, update: PairFactors) -> PairFactors:
        """Factors with the same vector of each cell added to all ranks."""
        share = (update.left + update.right).sum(dim=-1, keepdim=True) / pair.rank
        return PairFactors(pair.left + share, pair.right + share, pair.mask)


def make_residual(kind: PairResidual, n_channels: int, max_rank: int) -> RankMix | TangentStep | Distribute:
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
    raise ValueError(f"pair_residual={kind!r} is unknown; choose 'mix', 'tangent' or 'distribute'")


class PairDropout(nn.Module):
    """Dropout of whole rows or columns in training.

    Parameters
    ----------
    rate
        Share of the entries that is dropped.
    shared_over
        ``"row"``: one draw for all rows; ``"column"``: one draw for all columns.

    Raises
    ------
    ValueError
        If the rate is not between 0 and 1.
    """

    def __init__(self, rate: float, shared_over: SharedOver) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"pair_dropout={rate} must be at least 0 and less than 1")
        self.rate, self.shared_over = rate, shared_over
        self.dropout = Dropout(rate)

    def forward(self, pair: PairFactors) -> PairFactors:
        """Map factors to factors."""
        if not self.training or self.rate == 0:
            return pair
        keep = self.dropout(torch.ones_like(pair.left[..., 0].mT)).mT.unsqueeze(-1)  # (B, C, N, 1)
        if self.shared_over == "row":
            return PairFactors(pair.left, pair.right * keep, pair.mask)
        return PairFactors(pair.left * keep, pair.right, pair.mask)
