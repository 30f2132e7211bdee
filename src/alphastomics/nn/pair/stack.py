r"""Stack of layers on factors of pair features, the counterpart of the pair track of a folding network.

.. math::

    p \leftarrow p \oplus \operatorname{Dropout} \operatorname{TriangleMultiplication}_{out}(p), \quad
    p \leftarrow p \oplus \operatorname{Dropout} \operatorname{TriangleMultiplication}_{in}(p), \quad
    p \leftarrow \operatorname{Transition}(p)

:math:`\oplus` adds an update without increasing the rank, see :mod:`alphastomics.nn.pair.updates`. Triangle attention, axial
attention or cross attention can be added between multiplication and transition; the default is none, because multiplication
alone performs as well (Pairmixer, arXiv 2510.18870). An untrained layer is the identity, unless its residual is
``"distribute"``. Time and memory of the default are linear in N.
"""

from __future__ import annotations

from typing import get_args

from torch import nn

from alphastomics.config import NetworkConfig, PairAttention, PairResidual
from alphastomics.nn.pair.axial import AxialAttention, FactorCrossAttention
from alphastomics.nn.pair.factors import PairFactors
from alphastomics.nn.pair.triangle import TriangleAttention, TriangleMultiplication
from alphastomics.nn.pair.updates import PairDropout, make_residual

N_LAYERS, N_HEADS, EXPANSION = 2, 4, 2  # of a stack; the last is the width of a transition over C


class PairTransition(nn.Module):
    r"""Two layers over the channels of every cell and rank, added to the factors.

    .. math:: L'_{ir} = L_{ir} + W_2 \operatorname{GELU}(W_1 \operatorname{LN}(L_{ir}) + b_1) + b_2

    and likewise for R, with separate weights. Mixing channels is not closed on p: it acts on the factors, and other factors
    of the same p give another result.

    Parameters
    ----------
    n_channels
        C.
    """

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.left, self.right = _mlp(n_channels), _mlp(n_channels)

    def forward(self, pair: PairFactors) -> PairFactors:
        """Map factors to factors."""
        left, right = (
            side + mlp(side.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            for side, mlp in zip(pair[:2], (self.left, self.right), strict=True)
        )
        return PairFactors.masked(left, right, pair.mask)


def _mlp(n_channels: int) -> nn.Sequential:
    hidden = EXPANSION * n_channels
    last = nn.Linear(hidden, n_channels)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.LayerNorm(n_channels), nn.Linear(n_channels, hidden), nn.GELU(), last)


class Update(nn.Module):
    """Operation that returns an update, its dropout, and the residual that adds it."""

    def __init__(self, operation: nn.Module, dropout: PairDropout, residual: nn.Module) -> None:
        super().__init__()
        self.operation, self.dropout, self.residual = operation, dropout, residual

    def forward(self, pair: PairFactors) -> PairFactors:
        """Map factors to factors."""
        return self.residual(pair, self.dropout(self.operation(pair)))


class PairLayer(nn.Module):
    """One layer of :class:`PairStack`, with the same parameters."""

    def __init__(
        self,
        n_channels: int,
        max_rank: int,
        *,
        attention: PairAttention | None = None,
        dropout: float = NetworkConfig.pair_dropout,
        residual: PairResidual = NetworkConfig.pair_residual,
    ) -> None:
        super().__init__()
        if attention is not None and attention not in get_args(PairAttention):
            choices = ", ".join(map(repr, get_args(PairAttention)))
            raise ValueError(f"pair_attention={attention!r} is unknown; choose {choices} or None")
        operations: list[nn.Module] = [TriangleMultiplication(n_channels, d) for d in ("outgoing", "incoming")]
        if attention == "triangle":
            operations += [TriangleAttention(n_channels, N_HEADS, d) for d in ("starting", "ending")]
        self.updates = nn.ModuleList()
        for operation in operations:
            ending = isinstance(operation, TriangleAttention) and operation.direction == "ending"
            drop = PairDropout(dropout, "column" if ending else "row")
            self.updates.append(Update(operation, drop, make_residual(residual, n_channels, max_rank)))
        self.attention = nn.ModuleList()
        if attention == "axial":
            self.attention.append(AxialAttention(n_channels, N_HEADS))
        if attention == "cross":
            self.attention.append(FactorCrossAttention(n_channels, N_HEADS, max_rank))
        self.transition = PairTransition(n_channels)

    def forward(self, pair: PairFactors) -> PairFactors:
        """Map factors to factors."""
        for part in (*self.updates, *self.attention, self.transition):
            pair = part(pair)
        return pair


class PairStack(nn.Module):
    """Layers on factors of any rank up to the largest.

    Parameters
    ----------
    n_channels
        C.
    max_rank
        Largest rank; smaller ranks use the first parameters.
    attention
        ``"axial"`` or ``"cross"``, O(N^2) in time, ``"triangle"``, O(N^3), or None.
    dropout
        Share of the entries of an update that are dropped: by column for ending nodes, else by row.
    residual
        Addition of updates: ``"mix"``, ``"tangent"`` or ``"distribute"``.

    Raises
    ------
    ValueError
        If an option is unknown, or C is not a multiple of the number of heads.
    """

    def __init__(
        self,
        n_channels: int,
        max_rank: int,
        *,
        attention: PairAttention | None = None,
        dropout: float = NetworkConfig.pair_dropout,
        residual: PairResidual = NetworkConfig.pair_residual,
    ) -> None:
        super().__init__()
        self.max_rank = max_rank
        self.layers = nn.ModuleList(
            PairLayer(
                n_channels,
                max_rank,
                attention=attention,
                dropout=dropout,
                residual=residual,
            )
            for _ in range(N_LAYERS)
        )

    def forward(self, pair: PairFactors) -> PairFactors:
        """Map factors to factors of the same rank.

        Raises
        ------
        ValueError
            If the rank exceeds ``max_rank``.
        """
        if pair.rank > self.max_rank:
            raise ValueError(f"factors of rank {pair.rank} exceed max_rank={self.max_rank}")
        for layer in self.layers:
            pair = layer(pair)
        return pair
