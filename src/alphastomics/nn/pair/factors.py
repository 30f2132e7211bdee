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
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

N_FREQUENCIES = 8  # M, number of frequencies of differences in an order
BYTES = 4  # of a number in single precision
EPSILON = 1e-6  # added to mean squares under a root
RIDGE = 1000  # machine epsilons: above the rounding errors that a nearly singular matrix would amplify


def upcast(x: Tensor) -> Tensor:
    """Convert ``x`` to single precision if it has less."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def gram(x: Tensor, y: Tensor) -> Tensor:
    """Sums x^T y over the cells, (..., R, S), of ``x`` (..., N, R) and ``y`` (..., N, S), in single precision at least."""
    with torch.autocast(x.device.type, enabled=False):
        return upcast(x).mT @ upcast(y)


def divide_by_gram(x: Tensor, basis: Tensor) -> Tensor:
    r"""Solve for coordinates in a basis: :math:`x\,(U^\top U + \lambda I)^{-1}`.

    λ is 1,000 rounding errors of the mean eigenvalue of the Gram matrix, which is singular if there are fewer cells than ranks or if
    features are zero.

    Parameters
    ----------
    x
        (..., M, R).
    basis
        U, (..., N, R). A basis of zeros gives zeros if ``x`` is :math:`O U`.
    """
    with torch.autocast(x.device.type, enabled=False):
        matrix = gram(basis, basis)
        limits = torch.finfo(matrix.dtype)
        rank = matrix.shape[-1]
        mean = matrix.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
        identity = torch.eye(rank, dtype=matrix.dtype, device=matrix.device)
        floor = limits.tiny**0.5  # avoids a singular matrix for a basis of zeros
        return torch.linalg.solve(matrix + (RIDGE * limits.eps * mean + floor) * identity, upcast(x), left=False)


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
        N, of a context with its padding, and C.
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
