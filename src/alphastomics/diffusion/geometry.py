r"""Rigid geometry of sets of cells: centering and the best rotation or reflection (Kabsch 1976, Umeyama 1991).

.. math::

    R^\star = \arg\min_{R \in O(D)} \sum_i w_i \lVert x_i R - y_i \rVert^2 = U V^\top,
    \qquad U \Sigma V^\top = M = \sum_i w_i\, x_i^\top y_i

In two dimensions, with :math:`R_\pm` the best rotation and the best reflection,

.. math::

    R_+ = \frac1p \begin{pmatrix} M_{11} + M_{22} & M_{12} - M_{21} \\ M_{21} - M_{12} & M_{11} + M_{22} \end{pmatrix}, \quad
    R_- = \frac1q \begin{pmatrix} M_{11} - M_{22} & M_{12} + M_{21} \\ M_{12} + M_{21} & M_{22} - M_{11} \end{pmatrix},

whose rows are unit vectors; :math:`R^\star = R_+` if :math:`p \ge q`, else :math:`R_-`.

Positions are row vectors: a rotation acts from the right, ``x @ R``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over the cells of each context, (B, 1, D), of ``x`` (B, N, D) where ``mask`` (B, N) is true."""
    if mask is None:
        return x.mean(-2, keepdim=True)
    weight = mask.to(x.dtype).unsqueeze(-1)
    return (x * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True).clamp_min(1)


def center(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """``x`` (B, N, D) with zero mean over the real cells; padding is set to zero."""
    x = x - masked_mean(x, mask)
    return x if mask is None else x * mask.unsqueeze(-1)


@torch.no_grad()
def kabsch(source: Tensor, target: Tensor, weight: Tensor | None = None, *, reflection: bool = True) -> Tensor:
    """Rotation (B, D, D) that brings centered ``source`` closest to centered ``target``, both (B, N, D).

    ``weight`` (B, N) weighs the cells and is 0 for padding. The result is computed in at least float32, outside autocast
    and without a gradient, which is unbounded where singular values are equal. In two dimensions a GPU need not wait for it; the
    singular value decomposition in more dimensions checks its convergence.
    """
    with torch.autocast(source.device.type, enabled=False):
        dtype = torch.promote_types(source.dtype, torch.float32)
        source, target = source.to(dtype), target.to(dtype)
        if weight is not None:
            source = source * weight.to(dtype).unsqueeze(-1)
        moment = source.transpose(-1, -2) @ target
        if moment.shape[-1] == 2:
            return _kabsch_2d(moment, reflection=reflection)
        u, _, vh = torch.linalg.svd(moment.nan_to_num(0.0, 0.0, 0.0))  # of a value that is not finite, it would fail
        if not reflection:
            sign = torch.linalg.det(u @ vh).sign()
            u = torch.cat([u[..., :-1], u[..., -1:] * sign[..., None, None]], dim=-1)
        return u @ vh


def _kabsch_2d(moment: Tensor, *, reflection: bool) -> Tensor:
    """Rotation or reflection (B, 2, 2) that maximizes the trace of its transpose times ``moment``; the identity where that is 0."""
    (a, b), (c, d) = (row.unbind(-1) for row in moment.unbind(-2))
    p, q = torch.hypot(a + d, b - c), torch.hypot(a - d, b + c)
    mirrored = (q > p) & reflection
    x, y = torch.where(mirrored, a - d, a + d), torch.where(mirrored, b + c, b - c)
    norm = torch.where(mirrored, q, p)
    x = torch.where(norm > 0, x / norm, 1.0)
    y = torch.where(norm > 0, y / norm, 0.0)
    sign = torch.where(mirrored, -1.0, 1.0)
    return torch.stack([torch.stack([x, y], dim=-1), torch.stack([-sign * y, sign * x], dim=-1)], dim=-2)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """``x @ rotation`` in the precision of ``x``; autocast would round positions to three digits."""
    with torch.autocast(x.device.type, enabled=False):
        return x @ rotation.to(x.dtype)


def align(source: Tensor, target: Tensor, mask: Tensor | None = None, *, reflection: bool = True) -> Tensor:
    """``source`` (B, N, D) rigidly moved onto ``target``; the result has the center of ``target``."""
    offset = masked_mean(target, mask)
    source = center(source, mask)
    rotation = kabsch(source, target - offset, None if mask is None else mask.to(source.dtype), reflection=reflection)
    return rotate(source, rotation) + offset
