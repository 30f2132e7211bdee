r"""Dropout of whole rows or columns of pair features (Jumper et al. 2021, section 1.11.6), on factors.

.. math:: p'_{ijc} = m_{jc}\, p_{ijc} \;\; \text{(row)}, \qquad p'_{ijc} = m_{ic}\, p_{ijc} \;\; \text{(column)}

with independent :math:`m = \text{Bernoulli}(1 - \rho) / (1 - \rho)` for each context: ``"row"`` shares the draw over the
rows i of a context, ``"column"`` over its columns j. Either is a product with one side of the factors, the same for
all ranks, so it is exact.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from alphastomics.nn.pair.factors import PairFactors

SharedOver = Literal["row", "column"]


class PairDropout(nn.Module):
    """Row-wise or column-wise dropout in training.

    Parameters
    ----------
    rate
        Share of the entries that is dropped.
    shared_over
        ``"row"`` or ``"column"``.
    """

    def __init__(self, rate: float, shared_over: SharedOver) -> None:
        super().__init__()
        self.rate, self.shared_over = rate, shared_over

    def forward(self, pair: PairFactors) -> PairFactors:
        """Factors to factors."""
        if not self.training or self.rate == 0:
            return pair
        keep = F.dropout(torch.ones_like(pair.left[..., :1]), self.rate)  # (B, C, N, 1)
        if self.shared_over == "row":
            return PairFactors(pair.left, pair.right * keep, pair.mask)
        return PairFactors(pair.left * keep, pair.right, pair.mask)
