r"""Features of pairs of cells for a whole forward pass, from what the network knows before its first block.

.. math::

    p = \operatorname{Stack}\big(p^{tokens}(h^0) + \tau\, p^{position}(z^{pos}) + p^{index}(s)\big)

in factors of rank R, see :mod:`alphastomics.nn.pair.factors`. :math:`\tau` is the trust in positions: where they are absent
they add nothing. The index s is there where the cells have an order. R may change from one pass to the next, and no weight
depends on it: ranks of tokens are cut off at the end. The layers of the stack run once more on the way back: what they hold
would outweigh the blocks of the network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from alphastomics.nn.pair.embedding import PairEmbedding
from alphastomics.nn.pair.factors import PairFactors, adaptive_rank
from alphastomics.nn.pair.relative_position import RelativePosition
from alphastomics.nn.pair.stack import PairStack
from alphastomics.nn.pair.template import Template

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.nn.geometry import Geometry

N_CHANNELS = 16  # C
MAX_RANK = 32
TOKEN_RANKS = 4, 12  # that "auto" keeps whatever they cost, and that it takes where they cost little
BUDGET = 2**26  # bytes of one pair of factors of a context: rank 16 up to 32,768 cells
N_FREQUENCIES = 8  # of the order


def n_fixed_ranks(n_dims: int, *, sequence: bool) -> int:
    """Ranks of squared distances in D dimensions, and of the order where there is one; they are always there."""
    return n_dims + 2 + 2 * N_FREQUENCIES * sequence


class PairFeatures(nn.Module):
    """Embedding of pairs and the layers on it.

    Parameters
    ----------
    d_model
        Width d of the tokens.
    n_dims
        D.
    rank
        R, or ``"auto"``: what :func:`~alphastomics.nn.pair.factors.adaptive_rank` gives for the longest context of a batch.
    sequence
        Whether cells have an order.
    n_layers
        Layers on the factors.
    """

    def __init__(
        self,
        d_model: int,
        n_dims: int,
        *,
        rank: int | Literal["auto"] = "auto",
        sequence: bool = False,
        n_layers: int = 2,
    ) -> None:
        super().__init__()
        self.n_dims, self.rank = n_dims, rank
        self.embedding = PairEmbedding(
            d_model,
            N_CHANNELS,
            MAX_RANK,
            template=Template(N_CHANNELS, n_dims),
            relative_position=RelativePosition(N_CHANNELS, n_frequencies=N_FREQUENCIES) if sequence else None,
        )
        self.stack = PairStack(N_CHANNELS, MAX_RANK, n_layers=n_layers)

    def rank_for(self, n_cells: int) -> int:
        """R for a context of ``n_cells``."""
        if self.rank != "auto":
            return self.rank
        lowest, highest = (self.embedding.fixed_rank + ranks for ranks in TOKEN_RANKS)
        return adaptive_rank(n_cells, N_CHANNELS, budget_bytes=BUDGET, lowest=lowest, highest=min(highest, MAX_RANK))

    def forward(self, x: Tensor, geometry: Geometry, mask: Tensor | None = None) -> PairFactors:
        """Embed the cells of a batch.

        Parameters
        ----------
        x
            Tokens (B, N, d).
        geometry
            Positions with their trust, and the order where there is one.
        mask
            Real cells (B, N).

        Raises
        ------
        ValueError
            If the order is missing.
        """
        pairs: PairFactors = self.embedding(
            x,
            position=geometry.centred(x, mask, self.n_dims),
            trust=geometry.trusted(x),
            index=geometry.sequence,
            mask=mask,
            rank=self.rank_for(x.shape[1]),
        )
        for layer in self.stack.layers:
            pairs = checkpoint(layer, pairs, use_reentrant=False, preserve_rng_state=False)
        return pairs
