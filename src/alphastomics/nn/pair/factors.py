r"""Pair features as factors, so that their N x N matrices are never formed, and residuals and dropout on factors.

.. math::

    p_{ijc} = \sum_{r=1}^{R} L_{icr} R_{jcr}

Left and right factors are stored as (B, C, N, R), so that every contraction is a batched matrix product. For any invertible M,
:math:`L_c M` and :math:`R_c M^{-\top}` are factors of the same p. The second moment of p over the n^2 pairs of real cells is
computed from R x R matrices, in O(N R^2) per channel:

.. math:: \overline{p_c^2} = \operatorname{tr}\big[(L_c^\top L_c)(R_c^\top R_c)\big] / n^2

Exact on factors are sums (ranks add up), products with a cell-wise gate :math:`g_{ic} h_{jc}`, maps :math:`A p_c B^\top`
of either axis, and contractions over a cell. **Not closed** are maps that mix the channels of p (the rank grows C-fold),
entry-wise products of two p, and other entry-wise functions, such as layer norm or a gate that depends on the pair. Modules
that apply such operations to the factors state this in their docstrings.

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

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from alphastomics.nn.random import Dropout

if TYPE_CHECKING:
    from alphastomics.config import PairResidual

N_FREQUENCIES = 8  # M, number of frequencies of differences in an order
BYTES = 4  # of a number in single precision
EPSILON = 1e-6  # added to mean squares under a root


def upcast(x: Tensor) -> Tensor:
    """Convert ``x`` to single precision if it has less."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def gram(x: Tensor, y: Tensor) -> Tensor:
    """Sums x^T y over the cells, (..., R, S), of ``x`` (..., N, R) and ``y`` (..., N, S), in single precision at least."""
    with torch.autocast(x.device.type, enabled=False):
        return upcast(x).mT @ upcast(y)


def divide_by_gram(x: Tensor, basis: Tensor, *, ridge: float | None = None) -> Tensor:
    r"""Solve for coordinates in a basis: :math:`x\,(U^\top U + \lambda I)^{-1}`.

    Parameters
    ----------
    x
        (..., M, R).
    basis
        U, (..., N, R). A basis of zeros gives zeros if ``x`` is :math:`O U`.
    ridge
        :math:`\lambda` over the mean eigenvalue of the Gram matrix; by default of the size of rounding errors.
    """
    with torch.autocast(x.device.type, enabled=False):
        matrix = gram(basis, basis)
        limits = torch.finfo(matrix.dtype)
        rank = matrix.shape[-1]
        mean = matrix.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
        share = rank * limits.eps if ridge is None else ridge
        identity = torch.eye(rank, dtype=matrix.dtype, device=matrix.device)
        floor = limits.tiny**0.5  # avoids a singular matrix for a basis of zeros
        return torch.linalg.solve(matrix + (share * mean + floor) * identity, upcast(x), left=False)


class PairFactors(NamedTuple):
    """Low-rank pair features of a batch of contexts.

    Attributes
    ----------
    left, right
        L and R, (B, C, N, R), zero for padding; see :meth:`masked`.
    mask
        Real cells (B, N); None if all are.
    """

    left: Tensor
    right: Tensor
    mask: Tensor | None = None

    @classmethod
    def masked(cls, left: Tensor, right: Tensor, mask: Tensor | None) -> PairFactors:
        """Factors ``left`` and ``right`` (B, C, N, R), set to zero for padding."""
        if mask is not None:
            real = mask[:, None, :, None]
            left, right = left.masked_fill(~real, 0), right.masked_fill(~real, 0)
        return cls(left, right, mask)

    @property
    def rank(self) -> int:
        """R."""
        return self.left.shape[-1]

    def n_real(self) -> Tensor:
        """Number of real cells n, at least 1, (B, 1, 1)."""
        b, _, n, _ = self.left.shape
        real = upcast(self.left).dtype
        if self.mask is None:
            return torch.full((b, 1, 1), n, dtype=real, device=self.left.device)
        return self.mask.sum(dim=1).clamp_min(1).to(real)[:, None, None]

    def dense(self) -> Tensor:
        """The tensor p, (B, N, N, C), for tests and small N."""
        return (self.left @ self.right.mT).permute(0, 2, 3, 1)

    def transposed(self) -> PairFactors:
        """Factors of p_ji."""
        return PairFactors(self.right, self.left, self.mask)

    def add(self, other: PairFactors) -> PairFactors:
        """Factors of the sum with ``other``, features of the same cells, whose ranks come last."""
        left, right = torch.cat([self.left, other.left], dim=-1), torch.cat([self.right, other.right], dim=-1)
        return PairFactors(left, right, self.mask)

    def roll_channels(self, shift: int) -> PairFactors:
        """Factors with channel c - ``shift`` at index c."""
        return PairFactors(self.left.roll(shift, dims=1), self.right.roll(shift, dims=1), self.mask)

    def gated(self, row: Tensor, column: Tensor) -> PairFactors:
        """Factors of g_ic h_jc p_ijc; g is ``row``, h is ``column``, both (B, N, C) or (B, 1, C)."""
        left, right = (gate.mT.unsqueeze(-1).to(self.left.dtype) for gate in (row, column))
        return PairFactors(self.left * left, self.right * right, self.mask)

    def inverse_rms(self) -> Tensor:
        """Inverse root mean square of p_c over the pairs of real cells, (B, 1, C)."""
        products = gram(self.left, self.left) * gram(self.right, self.right)
        mean_square = products.sum(dim=(-2, -1))[:, None] / self.n_real() ** 2
        return (mean_square.clamp_min(0) + EPSILON).rsqrt()  # rounding may make the trace negative

    def rms_norm(self) -> PairFactors:
        """Factors of p_c divided by its root mean square; both sides are scaled equally."""
        root = self.inverse_rms().sqrt()
        return self.gated(root, root)

    def marginals(self) -> Tensor:
        """Diagonal p_iic, row means and column means over real cells, concatenated, (B, N, 3C)."""
        with torch.autocast(self.left.device.type, enabled=False):
            left, right = upcast(self.left), upcast(self.right)
            n = self.n_real()
            diagonal = (left * right).sum(dim=-1)
            row = (left @ (right.sum(dim=2) / n).unsqueeze(-1)).squeeze(-1)
            column = (right @ (left.sum(dim=2) / n).unsqueeze(-1)).squeeze(-1)
        return torch.cat([diagonal, row, column], dim=1).mT.to(self.left.dtype)


def n_fixed_ranks(n_dims: int, *, sequence: bool) -> int:
    """Ranks of squared distances in D dimensions and of the order, if any, which are never truncated."""
    return n_dims + 2 + 2 * N_FREQUENCIES * sequence


def adaptive_rank(n_cells: int, n_channels: int, *, budget_bytes: int, lowest: int, highest: int) -> int:
    r"""Largest rank whose factors fit into a budget.

    .. math:: R = \operatorname{clamp}\big(\lfloor \text{budget} / (2 N C\, \text{bytes}) \rfloor, R_{min}, R_{max}\big)

    Networks on factors have weights for :math:`R_{max}` ranks and use the first R, so that R may differ between contexts.

    Parameters
    ----------
    n_cells, n_channels
        N, of all contexts of a batch together, and C.
    budget_bytes
        Memory for one pair of factors. Training keeps several.
    lowest, highest
        R_min, also used if it does not fit, and R_max.

    Raises
    ------
    ValueError
        If R_min is not between 1 and R_max.
    """
    if not 1 <= lowest <= highest:
        raise ValueError(f"lowest={lowest} must lie between 1 and highest={highest}")
    fitting = budget_bytes // (2 * n_cells * n_channels * BYTES)
    return max(lowest, min(fitting, highest))


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


SharedOver = Literal["row", "column"]


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
