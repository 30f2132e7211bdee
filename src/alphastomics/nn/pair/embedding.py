r"""Pair features of the cells of a context: what each is, where it is, and its place in an order.

.. math::

    p_{ijc} = p^{position}_{ijc} + p^{index}_{ijc} + \sum_{r} (W_{cr} \cdot \operatorname{LN} x_i)\,(V_{cr} \cdot \operatorname{LN} x_j)

Each term has ranks of its own, so the sum is exact, as a product of sums would not be. Ranks of the tokens come last:
they can be cut off, see :meth:`PairFactors.truncate`. Nothing is N x N.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from alphastomics.nn.pair.factors import PairFactors

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.nn.pair.relative_position import RelativePosition
    from alphastomics.nn.pair.template import Template


class PairEmbedding(nn.Module):
    """Tokens, positions and indices to factors.

    Parameters
    ----------
    d_model
        Width d of the tokens.
    n_channels
        C.
    max_rank
        The largest rank of the sum.
    template
        Adds features of positions, if given.
    relative_position
        Adds features of indices, if given.

    Raises
    ------
    ValueError
        If template and relative position leave no rank for the tokens.
    """

    def __init__(
        self,
        d_model: int,
        n_channels: int,
        max_rank: int,
        *,
        template: Template | None = None,
        relative_position: RelativePosition | None = None,
    ) -> None:
        super().__init__()
        self.fixed_rank = sum(part.rank for part in (template, relative_position) if part is not None)
        token_rank = max_rank - self.fixed_rank
        if token_rank < 1:
            raise ValueError(
                f"max_rank={max_rank} must exceed {self.fixed_rank}, the rank of template and relative position"
            )
        self.template, self.relative_position = template, relative_position
        self.weight = nn.Parameter(d_model**-0.5 * token_rank**-0.25 * torch.randn(2, n_channels, token_rank, d_model))

    def forward(
        self,
        x: Tensor,
        *,
        position: Tensor | None = None,
        trust: Tensor | None = None,
        index: Tensor | None = None,
        mask: Tensor | None = None,
        rank: int | None = None,
    ) -> PairFactors:
        """Embed the cells of a batch.

        Parameters
        ----------
        x
            Tokens (B, N, d).
        position
            (B, N, D) in model units, if there is a template.
        trust
            How far positions count, (B,) in [0, 1]; 1 when None.
        index
            (B, N), if there is a relative position.
        mask
            Real cells (B, N).
        rank
            R of the factors; by default the largest.

        Raises
        ------
        ValueError
            If the position or the index is missing, or the rank leaves none for the tokens or exceeds the largest.
        """
        parts = []
        if self.template is not None:
            if position is None:
                raise ValueError("the template needs position=")
            part = self.template(position, mask)
            parts.append(part if trust is None else part._replace(right=trust[:, None, None, None] * part.right))
        if self.relative_position is not None:
            if index is None:
                raise ValueError("the relative position needs index=")
            parts.append(self.relative_position(index, mask))
        parts.append(self._tokens(x, mask, rank))
        left = torch.cat([part.left.to(x.dtype) for part in parts], dim=-1)
        right = torch.cat([part.right.to(x.dtype) for part in parts], dim=-1)
        return PairFactors(left, right, mask)

    def _tokens(self, x: Tensor, mask: Tensor | None, rank: int | None) -> PairFactors:
        _, c, most, d = self.weight.shape
        token_rank = most if rank is None else rank - self.fixed_rank
        if not 1 <= token_rank <= most:
            raise ValueError(f"rank={rank} must lie between {self.fixed_rank + 1} and {self.fixed_rank + most}")
        weight = self.weight[:, :, :token_rank].reshape(-1, d)
        factors = F.linear(F.layer_norm(x, (d,)), weight).unflatten(-1, (2, c, token_rank))
        left, right = factors.permute(2, 0, 3, 1, 4).contiguous()
        return PairFactors.masked(left, right, mask)
