r"""Frame-aligned point error (Jumper et al. 2021, algorithm 28) of ordered chains of points, and its training loss.

.. math::

    \operatorname{FAPE} = \frac{1}{Z\, \lvert P \rvert} \sum_{(i, j) \in P} \min\Big(
        \big\lVert \hat R_i^\top (\hat x_j - \hat x_i) - R_i^\top (x_j - x_i) \big\rVert,\; \tau \Big)

over the pairs P of a cell i that has a frame and another cell j. All cells are compared in the coordinates of every frame:
the error is invariant to rigid motions but, unlike a loss of distances, not to reflections. The columns of a frame are

.. math::

    e_1 \propto x_{i+1} - x_i, \qquad e_2 \propto u - (u \cdot e_1)\, e_1, \quad u = x_{i-1} - x_i, \qquad
    e_3 = e_1 \times e_2.

The training loss :func:`chain_losses` is this error of the prediction where positions are absent, with

.. math:: \tau = Z = \tfrac{10}{3.8}\, r

and r the distance of consecutive points: residues are 3.8 Å apart, and the error is clamped at 10 Å.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch import Tensor

ENTRIES = 2**20  # entries of the matrix of differences in memory at a time
EPSILON = 1e-12  # keeps the gradient of the norm finite where the prediction is perfect
STRAIGHT = 1e-3  # a cell has no frame if the sine of the angle at it is smaller
CLAMP = 10 / 3.8  # tau and Z of the training loss, in distances of consecutive points


class Frames(NamedTuple):
    """Local axes of cells.

    Attributes
    ----------
    axes
        R, (B, N, D, D), with the axes as columns; the identity for cells without a frame.
    mask
        Cells that have a frame, (B, N).
    """

    axes: Tensor
    mask: Tensor


def fape(
    predicted: Tensor,
    true: Tensor,
    mask: Tensor,
    frames_predicted: Tensor,
    frames_true: Tensor,
    *,
    clamp: float,
    scale: float,
    frame_mask: Tensor | None = None,
) -> Tensor:
    """Frame-aligned point error of each context, (B,); 0 in a context without pairs of a frame and another cell.

    The error is computed in blocks of frames, which are recomputed in the backward pass.

    Parameters
    ----------
    predicted, true
        Positions (B, N, D) in model units.
    mask
        Real cells (B, N).
    frames_predicted, frames_true
        Axes of the frames at these positions, (B, N, D, D).
    clamp
        τ in model units.
    scale
        Z in model units.
    frame_mask
        Cells that have a frame, (B, N); None if all real cells have one.

    Raises
    ------
    ValueError
        If ``clamp`` or ``scale`` is not positive.
    """
    if clamp <= 0 or scale <= 0:
        raise ValueError(f"clamp={clamp} and scale={scale} must be positive lengths in model units")
    has_frame = mask if frame_mask is None else mask & frame_mask
    with torch.autocast(predicted.device.type, enabled=False):
        dtype = torch.promote_types(predicted.dtype, torch.float32)
        x_hat, x, r_hat, r = (z.to(dtype) for z in (predicted, true, frames_predicted, frames_true))
        x_hat, x = (z.masked_fill(~mask[..., None], 0.0) for z in (x_hat, x))
        r_hat, r = (z.masked_fill(~has_frame[..., None, None], 0.0) for z in (r_hat, r))
        total = x_hat.new_zeros(len(x_hat))
        step = max(1, ENTRIES // max(1, x_hat.numel()))
        for start in range(0, x_hat.shape[1], step):
            arguments = (x_hat, x, r_hat, r, mask, has_frame, slice(start, start + step), clamp)
            total = total + checkpoint(_block, *arguments, use_reentrant=False, preserve_rng_state=False)
        pairs = (has_frame.sum(1) * (mask.sum(1) - 1)).clamp_min(1)
        return total / (scale * pairs.to(dtype))


def _block(
    x_hat: Tensor, x: Tensor, r_hat: Tensor, r: Tensor, mask: Tensor, has_frame: Tensor, rows: slice, clamp: float
) -> Tensor:
    """Sum of the clamped errors (B,) in the frames of ``rows``."""
    error = _local(x_hat, r_hat, rows) - _local(x, r, rows)
    number = torch.arange(mask.shape[1], device=mask.device)
    pair = has_frame[:, rows, None] & mask[:, None, :] & (number[rows, None] != number)
    clamped = (error.square().sum(2) + EPSILON).sqrt().clamp_max(clamp)
    return (clamped * pair).sum((1, 2))


def _local(x: Tensor, r: Tensor, rows: slice) -> Tensor:
    """Coordinates R_i^T (x_j - x_i) of all cells in the frames of ``rows``, (B, S, D, N)."""
    return r[:, rows].mT @ (x.mT[:, None] - x[:, rows, :, None])


def chain_frames(x: Tensor, mask: Tensor, *, index: Tensor | None = None) -> Frames:
    """Frames of the cells of a chain, each from the cell and its two adjacent cells.

    A cell has no frame at an end of the chain, next to a gap, or where the chain is straight.

    Parameters
    ----------
    x
        Positions (B, N, 3).
    mask
        Real cells (B, N).
    index
        Place of each cell in the chain, integers (B, N); None if the cells are in order.

    Raises
    ------
    ValueError
        If positions are not three-dimensional.
    """
    if x.shape[-1] != 3:
        raise ValueError(f"a chain has frames in 3 dimensions, not in {x.shape[-1]}")
    if index is None:
        index = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    place = index.masked_fill(~mask, torch.iinfo(index.dtype).max)
    order = place.argsort(dim=1, stable=True)
    place = place.gather(1, order)
    back = order.argsort(dim=1)
    with torch.autocast(x.device.type, enabled=False):
        points = x.to(torch.promote_types(x.dtype, torch.float32)).masked_fill(~mask[..., None], 0.0)
        points = points.gather(1, order[..., None].expand_as(points))
        axes, bent = _gram_schmidt(points)
        linked = F.pad(place[:, 1:] - place[:, :-1] == 1, (1, 1))  # entry i: cell i is next to cell i - 1
        found = bent & linked[:, :-1] & linked[:, 1:] & mask.gather(1, order)
        axes = torch.where(found[..., None, None], axes, torch.eye(3, dtype=axes.dtype, device=axes.device))
        return Frames(axes.gather(1, back[..., None, None].expand_as(axes)), found.gather(1, back))


def _gram_schmidt(points: Tensor) -> tuple[Tensor, Tensor]:
    """Axes (B, N, 3, 3) at the points (B, N, 3), which are in order, and whether the chain is bent there, (B, N)."""
    after, before = points.roll(-1, dims=1) - points, points.roll(1, dims=1) - points
    e_1 = F.normalize(after, dim=-1)
    across = before - (before * e_1).sum(-1, keepdim=True) * e_1
    bent = across.norm(dim=-1) > STRAIGHT * before.norm(dim=-1)
    e_2 = F.normalize(across, dim=-1)
    bent = bent & (after.abs().amax(-1) > 0)
    return torch.stack([e_1, e_2, torch.linalg.cross(e_1, e_2)], dim=-1), bent


def chain_losses(predicted: Tensor, true: Tensor, mask: Tensor, sequence: Tensor, spacing: float) -> Tensor:
    """Training loss of each context, (B,).

    Parameters
    ----------
    predicted, true
        Positions (B, N, 3) in model units, of the same handedness.
    mask
        Real cells (B, N).
    sequence
        Place of each cell in its chain (B, N), a whole number; cells next to a gap have no frame.
    spacing
        r, distance of consecutive points in model units.
    """
    place, clamp = sequence.round().long(), CLAMP * spacing
    found, frames = (chain_frames(x, mask, index=place) for x in (predicted, true))
    # Frames are selected by the truth, so that a straight prediction does not lower the loss.
    return fape(predicted, true, mask, found.axes, frames.axes, clamp=clamp, scale=clamp, frame_mask=frames.mask)
