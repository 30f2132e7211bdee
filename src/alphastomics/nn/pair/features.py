r"""Features of all pairs of cells in a context, as factors: the embedding of tokens, positions and order, and the stack.

.. math::

    p = \operatorname{Stack}\big(p^{position} + p^{index} + p^{tokens}\big), \qquad
    p^{tokens}_{ijc} = \sum_{r} (W_{cr} \cdot \operatorname{LN} x_i)\,(V_{cr} \cdot \operatorname{LN} x_j)

:math:`p^{position}` is the output of :class:`~alphastomics.nn.pair.Template` times the trust :math:`\tau` in positions.
:math:`p^{index}` is that of :class:`~alphastomics.nn.pair.RelativePosition`, if the cells have an order.

Each term has its own ranks, so that the sum is exact. Ranks of the tokens come last and can be truncated: the rank R may
change from one pass to the next. The layers of the stack are recomputed in the backward pass, because their activations would
take more memory than those of the blocks of the network. No N x N matrix is formed.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alphastomics.config._model import MAX_RANK
from alphastomics.nn.pair.factors import N_FREQUENCIES, PairFactors, adaptive_rank
from alphastomics.nn.pair.relative import RelativePosition, Template
from alphastomics.nn.pair.stack import PairStack
from alphastomics.nn.random import drawing_again

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.nn.config import DenoiserConfig


N_CHANNELS = 16  # C
TOKEN_RANKS = 4, 12  # fewest and most ranks of tokens with "auto"
BUDGET = 2**26  # bytes of the factors of a context with "auto": rank 16 up to 32,768 cells


class PairEmbedding(nn.Module):
    """Factors from tokens, positions and indices.

    Parameters
    ----------
    d_model
        Width d of the tokens.
    n_channels
        C.
    max_rank
        Largest rank of the sum.
    template
        Features of positions, if any.
    relative_position
        Features of indices, if any.

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
            Trust in positions, (B,) in [0, 1]; 1 if None.
        index
            (B, N), if there is a relative position.
        mask
            Real cells (B, N).
        rank
            R of the factors; by default ``max_rank``.

        Raises
        ------
        ValueError
            If the position or the index is missing, or the rank leaves no rank for the tokens or exceeds ``max_rank``.
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


class PairFeatures(nn.Module):
    """Pair features of a batch, as factors: the embedding of pairs and the stack of layers.

    Parameters
    ----------
    config
        Architecture. ``rank="auto"`` is :func:`~alphastomics.nn.pair.factors.adaptive_rank` of the largest context of a
        batch.
    """

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.n_dims, self.rank, self.dropout = config.n_dims, config.rank, config.pair_dropout
        self.embedding = PairEmbedding(
            config.d_model,
            N_CHANNELS,
            MAX_RANK,
            template=Template(N_CHANNELS, config.n_dims),
            relative_position=RelativePosition(N_CHANNELS, N_FREQUENCIES) if config.sequence else None,
        )
        self.stack = PairStack(
            N_CHANNELS,
            MAX_RANK,
            attention=config.pair_attention,
            residual=config.pair_residual,
            dropout=config.pair_dropout,
        )

    def rank_for(self, n_cells: int) -> int:
        """R for a context of ``n_cells``."""
        if self.rank != "auto":
            return self.rank
        lowest, highest = (self.embedding.fixed_rank + ranks for ranks in TOKEN_RANKS)
        return adaptive_rank(n_cells, N_CHANNELS, budget_bytes=BUDGET, lowest=lowest, highest=min(highest, MAX_RANK))

    def forward(
        self,
        x: Tensor,
        position: Tensor,
        trust: Tensor,
        sequence: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> PairFactors:
        """Embed the cells of a batch.

        Parameters
        ----------
        x
            Tokens (B, N, d).
        position
            Centered positions (B, N, D).
        trust
            Trust in positions, (B,) in [0, 1].
        sequence
            An index (B, N) that orders the cells, if they have an order.
        mask
            Real cells (B, N).

        Raises
        ------
        ValueError
            If the network uses an order and ``sequence`` is None.
        """
        pairs: PairFactors = self.embedding(
            x,
            position=position,
            trust=trust,
            index=sequence,
            mask=mask,
            rank=self.rank_for(x.shape[1]),
        )
        for layer in self.stack.layers:
            pairs = checkpoint(
                layer,
                pairs,
                use_reentrant=False,
                preserve_rng_state=self.dropout > 0,
                context_fn=lambda: (nullcontext(), drawing_again()),
            )
        return pairs
