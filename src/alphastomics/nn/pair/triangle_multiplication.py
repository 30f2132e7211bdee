r"""Triangle multiplication (Jumper et al. 2021, algorithms 11 and 12) on factors, exactly.

.. math::

    z_{ijc} &= \tfrac1n \sum_k w_{kc}\, \hat p_{ikc}\, \hat p_{jk,c-1} \;\; \text{(outgoing)}, \qquad
    z_{ijc} = \tfrac1n \sum_k w_{kc}\, \hat p_{kic}\, \hat p_{kj,c-1} \;\; \text{(incoming)} \\
    \Delta p_{ijc} &= g_{ic}\, h_{jc}\, \hat z_{ijc}, \qquad
    (g, w, h)_i = \sigma\big(W\,[\hat p_{ii},\, \overline{\hat p_{i\cdot}},\, \overline{\hat p_{\cdot i}}] + b\big)

The hat is the RMS norm over the pairs of a context, k runs over its n real cells. On factors the sum over k is one
R x R matrix for each channel, and the rank stays R:

.. math::

    G_{rs} = \tfrac1n \sum_k w_k R_{kr} R'_{ks}, \quad z = (L\,G)\, L'^\top \;\; \text{(outgoing)}, \qquad
    G_{rs} = \tfrac1n \sum_k w_k L_{kr} L'_{ks}, \quad z = (R\,G)\, R'^\top \;\; \text{(incoming)}

with the factors of the next channel primed. Time is O(N R^2 C) and memory O(N R C), for N^3 C and N^2 C of the tensor.

The algorithms of the source project p to two sets of channels, a and b, and gate them pair by pair. Neither is closed
on factors: a projection would multiply the rank by C, and no gate of a pair is separable. So a is p itself, b is p with
its channels moved on by one, the gates of a, b and z that meet the same cell are one, and channels are mixed elsewhere
(:class:`~alphastomics.nn.pair.PairTransition`). What remains is a function of p, whatever the factors, and the same
parameters act on a tensor of all pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor, nn

from alphastomics.nn.pair.dense import DensePairs
from alphastomics.nn.pair.factors import PairFactors, gram, upcast

if TYPE_CHECKING:
    from collections.abc import Callable

Direction = Literal["outgoing", "incoming"]
Pairs = TypeVar("Pairs", PairFactors, DensePairs)


class TriangleMultiplication(nn.Module):
    """The update of pair features by all triangles over a third cell.

    Parameters
    ----------
    n_channels
        C.
    direction
        ``"outgoing"``: edges ik and jk make ij; ``"incoming"``: edges ki and kj do.

    Raises
    ------
    ValueError
        If the direction is unknown.
    """

    def __init__(self, n_channels: int, direction: Direction = "outgoing") -> None:
        super().__init__()
        if direction not in ("outgoing", "incoming"):
            raise ValueError(f"direction={direction!r} is unknown; choose 'outgoing' or 'incoming'")
        self.direction = direction
        self.gates = nn.Linear(3 * n_channels, 3 * n_channels)

    def forward(self, pair: PairFactors | Tensor, mask: Tensor | None = None) -> PairFactors | Tensor:
        """Factors to the factors of the update, or p (B, N, N, C) to the update.

        ``mask`` (B, N) is that of a tensor; factors have their own.
        """
        if isinstance(pair, PairFactors):
            return self._update(pair, _contract_factors)
        return self._update(DensePairs.masked(pair, mask), _contract_dense).values

    def _update(self, pair: Pairs, contract: Callable[[Pairs, Pairs, Tensor], Pairs]) -> Pairs:
        scale = pair.inverse_rms()
        g, w, h = self.gates(pair.marginals() * scale.repeat(1, 1, 3)).sigmoid().chunk(3, dim=-1)
        edges = pair if self.direction == "outgoing" else pair.transposed()
        z = contract(edges, edges.roll_channels(1), w * scale * scale.roll(1, dims=-1))
        root = z.inverse_rms().sqrt()
        return z.gated(g * root, h * root)


def _contract_factors(a: PairFactors, b: PairFactors, w: Tensor) -> PairFactors:
    """z_ij, the mean over k of w_k a_ik b_jk, with ``w`` (B, N, C)."""
    core = gram(a.right * w.mT.unsqueeze(-1), b.right) / a.n_real()[..., None]
    left = a.left @ core.to(a.left.dtype)
    return PairFactors(left.to(a.left.dtype), b.left, a.mask)


def _contract_dense(a: DensePairs, b: DensePairs, w: Tensor) -> DensePairs:
    left, right = (upcast(part).permute(0, 3, 1, 2) for part in (a.values * w[:, None], b.values))
    with torch.autocast(w.device.type, enabled=False):
        z = left @ right.mT / a.n_real()[..., None]
    return DensePairs(z.permute(0, 2, 3, 1).to(a.values.dtype), a.mask)
