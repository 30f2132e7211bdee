r"""Loss of chains that are placed: the frame-aligned point error, where the frames of a prediction mean something.

.. math:: L = (1 - t)\, \operatorname{FAPE}(\hat x_0, x_0), \qquad \tau = Z = \tfrac{10}{3.8}\, r

r is the distance of consecutive points; for residues, 3.8 Å apart, the error is clamped at 10 Å (Jumper et al. 2021). The
frames of both are made of their own points, see :func:`alphastomics.diffusion.fape.chain_frames`, so that they say little
while the noise is strong: the loss fades with the clock t, and is 0 where positions are absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alphastomics.diffusion.fape import chain_frames, fape

if TYPE_CHECKING:
    from torch import Tensor

CLAMP = 10 / 3.8  # in distances of consecutive points


def chain_losses(predicted: Tensor, true: Tensor, t: Tensor, mask: Tensor, sequence: Tensor, spacing: float) -> Tensor:
    """Loss of each context, (B,).

    Parameters
    ----------
    predicted, true
        Positions (B, N, 3) in model units.
    t
        Clock of the positions (B,).
    mask
        Real cells (B, N).
    sequence
        Place of each cell in its chain (B, N), a whole number; cells beside a gap have no frame.
    spacing
        r in model units.
    """
    losses, runs = predicted.new_zeros(len(predicted)), (t > 0) & (t < 1)
    if bool(runs.any()):
        x_hat, x, real = predicted[runs], true[runs], mask[runs]
        place = sequence[runs].round().long()
        found, given = chain_frames(x_hat, real, index=place), chain_frames(x, real, index=place)
        clamp = CLAMP * spacing
        # The truth says which cells have a frame: a prediction must not escape by being straight.
        error = fape(x_hat, x, real, found.axes, given.axes, clamp=clamp, scale=clamp, frame_mask=given.mask)
        losses[runs] = (1 - t[runs]) * error
    return losses
