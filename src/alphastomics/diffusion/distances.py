r"""Losses of pairwise distances in flat memory, over all pairs of cells or over a random sample of them.

.. math::

    L = \frac{1}{n(n-1)} \sum_{i \ne j} f(r_{ij}), \qquad r_{ij} = \hat d_{ij} - d_{ij}, \qquad
    \hat d_{ij} = \lVert \hat x_i - \hat x_j \rVert

with :math:`f(r) = r^2` (``"mse"``), :math:`\min(|r|, \tau)` (``"clamped"``), or the loss of Huber (1964),
:math:`s (r - s/2)` with :math:`s = \max(-\tau, \min(r, \tau))` (``"huber"``), whose gradient does not vanish beyond τ.
``"drmsd"`` is the root :math:`\sqrt{L_\text{mse} + \epsilon}`. The gradient has the closed form

.. math::

    \frac{\partial L}{\partial \hat x_i} = \frac{2}{n(n-1)} \Big( \hat x_i \sum_j c_{ij} - \sum_j c_{ij} \hat x_j \Big),
    \qquad c_{ij} = \frac{f'(r_{ij})}{\hat d_{ij}},

which the forward pass computes in blocks of rows; only these (N, D) numbers are stored. The mean over a sample of M ordered
pairs, drawn uniformly with replacement, estimates L and its gradient without bias, except for ``"drmsd"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from alphastomics.diffusion.geometry import center

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.config import DistanceKind

    Penalty = Callable[[Tensor], tuple[Tensor, Tensor]]  # r to f(r) and f'(r)
    Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]  # positions (B, N, D) to losses (B,) and their gradient

ENTRIES = 2**20  # entries of the pair matrices in memory at a time
EPSILON = 1e-12  # keeps the slope of the root finite where the prediction is perfect


class PairSample(NamedTuple):
    """Ordered pairs (i, j) of different cells, drawn with replacement.

    Attributes
    ----------
    i, j
        Indices of the cells, (B, M).
    weight
        1 / M, (B, M); 0 in contexts without pairs.
    """

    i: Tensor
    j: Tensor
    weight: Tensor


def distance_loss(
    predicted: Tensor,
    true: Tensor,
    mask: Tensor,
    *,
    kind: DistanceKind = "mse",
    clamp: float | None = None,
    n_pairs: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Loss of the pairwise distances of each context, (B,); 0 for fewer than two cells.

    Parameters
    ----------
    predicted
        Positions (B, N, D) in model units.
    true
        Positions (B, N, D) in model units; they receive no gradient.
    mask
        Real cells (B, N).
    kind
        ``"mse"``, ``"drmsd"``, ``"clamped"`` or ``"huber"``; see the equations of the module.
    clamp
        τ of ``"clamped"`` and ``"huber"``, in model units.
    n_pairs
        M, number of pairs drawn in each context; None for all pairs.
    generator
        Generator of the pairs, on any device.

    Raises
    ------
    ValueError
        If the kind is unknown, ``clamp`` is missing, not positive or not applicable, or ``n_pairs`` is given for ``"drmsd"``,
        because the root of a sampled mean is biased.
    """
    penalty = _penalty(kind, clamp)
    if n_pairs is not None and kind == "drmsd":
        raise ValueError(f"n_pairs={n_pairs}: the root of a sampled mean is biased; pass kind='mse' or n_pairs=None")
    with torch.autocast(predicted.device.type, enabled=False):
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        true = center(true.to(predicted.dtype).masked_fill(~mask[..., None], 0.0), mask)

        def evaluate(x: Tensor) -> tuple[Tensor, Tensor]:
            # Rounding errors of sums and differences are smallest around the origin.
            x = center(x.masked_fill(~mask[..., None], 0.0), mask)
            if n_pairs is None:
                return _over_all(x, true, mask, penalty)
            return _over_sample(x, true, draw_pairs(mask, n_pairs, generator=generator), penalty)

        loss: Tensor = _ClosedForm.apply(predicted, evaluate)
        return (loss + EPSILON).sqrt() * (mask.sum(1) > 1) if kind == "drmsd" else loss


def _penalty(kind: DistanceKind, clamp: float | None) -> Penalty:
    if kind in ("mse", "drmsd"):
        if clamp is not None:
            raise ValueError(f"kind={kind!r} has no threshold; leave clamp={clamp} out or take 'clamped' or 'huber'")
        return lambda r: (r * r, 2 * r)
    if kind not in ("clamped", "huber"):
        raise ValueError(f"kind={kind!r} is unknown; choose 'mse', 'drmsd', 'clamped' or 'huber'")
    if clamp is None or clamp <= 0:
        raise ValueError(f"kind={kind!r} needs a threshold clamp > 0 in model units, not {clamp}")

    def clamped(r: Tensor) -> tuple[Tensor, Tensor]:
        return r.abs().clamp_max(clamp), r.sign() * (r.abs() < clamp)

    def huber(r: Tensor) -> tuple[Tensor, Tensor]:
        s = r.clamp(-clamp, clamp)
        return s * (r - s / 2), s

    return clamped if kind == "clamped" else huber


class _ClosedForm(torch.autograd.Function):
    """Loss whose value and gradient are computed together; only the gradient is stored for the backward pass."""

    @staticmethod
    def forward(ctx: Any, predicted: Tensor, evaluate: Evaluate) -> Tensor:
        value, gradient = evaluate(predicted)
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None, None], None


@torch.no_grad()
def pairwise_distances(rows: Tensor, cells: Tensor) -> Tensor:
    """Distances (B, S, N) between ``rows`` (B, S, D) and ``cells`` (B, N, D), from differences and without a gradient.

    Expanding the square has errors of 1e-2 for close points, and ``cdist`` without it is slow in few dimensions.
    """
    squared = rows.new_zeros(len(rows), rows.shape[1], cells.shape[1])
    for a, b in zip(rows.mT.contiguous().unbind(1), cells.mT.contiguous().unbind(1), strict=True):
        difference = a[:, :, None] - b[:, None, :]
        squared.addcmul_(difference, difference)
    return squared.sqrt_()


def _over_all(x_hat: Tensor, x: Tensor, mask: Tensor, penalty: Penalty) -> tuple[Tensor, Tensor]:
    chunk = max(1, ENTRIES // max(1, mask.numel()))
    m = mask.to(x_hat.dtype)
    weighted = torch.cat([x_hat, torch.ones_like(x_hat[..., :1])], dim=-1) * m[..., None]
    value, gradient = torch.empty_like(m), torch.empty_like(x_hat)
    for start in range(0, x_hat.shape[1], chunk):
        rows = slice(start, start + chunk)
        d_hat = pairwise_distances(x_hat[:, rows], x_hat)
        f, slope = penalty(d_hat - pairwise_distances(x[:, rows], x))  # both are 0 on the diagonal
        value[:, rows] = (f @ m[..., None]).squeeze(-1)
        sums = _over_distance(slope, d_hat) @ weighted
        gradient[:, rows] = 2 * (x_hat[:, rows] * sums[..., -1:] - sums[..., :-1])
    n = m.sum(1, keepdim=True)
    share = m / (n * (n - 1)).clamp_min(1)
    return (value * share).sum(1), gradient * share[..., None]


def _over_sample(x_hat: Tensor, x: Tensor, sample: PairSample, penalty: Penalty) -> tuple[Tensor, Tensor]:
    b, n, n_dims = x_hat.shape
    first = n * torch.arange(b, device=x_hat.device)[:, None]
    i, j = ((cells + first).flatten() for cells in (sample.i, sample.j))
    x_hat, x = x_hat.reshape(-1, n_dims), x.reshape(-1, n_dims)
    weight = sample.weight.to(x_hat.dtype)
    offset = x_hat[i] - x_hat[j]
    d_hat = offset.norm(dim=-1)
    f, slope = penalty(d_hat - (x[i] - x[j]).norm(dim=-1))
    force = (weight.flatten() * _over_distance(slope, d_hat))[:, None] * offset
    gradient = torch.zeros_like(x_hat).index_add_(0, i, force).index_add_(0, j, force, alpha=-1)
    return (weight * f.view(b, -1)).sum(1), gradient.view(b, n, n_dims)


def _over_distance(slope: Tensor, distance: Tensor) -> Tensor:
    # The direction between coinciding predictions is undefined: their gradient is 0.
    return (slope / distance).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def draw_pairs(mask: Tensor, n_pairs: int, *, generator: torch.Generator | None = None) -> PairSample:
    """Draw M = ``n_pairs`` ordered pairs of different real cells of each context, uniformly."""
    # Integers, because floats in [0, 1) are too coarse to index many cells.
    device = mask.device if generator is None else generator.device
    number = torch.randint(2**62, (2, len(mask), n_pairs), generator=generator, device=device).to(mask.device)
    n = mask.sum(1, keepdim=True)
    i = number[0] % n.clamp_min(1)
    j = number[1] % (n - 1).clamp_min(1)
    j = (j + (j >= i)).clamp_max(mask.shape[1] - 1)
    real = mask.int().argsort(dim=1, descending=True, stable=True)
    return PairSample(real.gather(1, i), real.gather(1, j), (n > 1) / torch.full_like(i, n_pairs))
