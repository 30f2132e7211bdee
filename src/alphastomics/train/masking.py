"""Masks of a batch: keyed by context like all draws of training, and none for a modality that is absent."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from alphastomics.diffusion.masking import draw_mask
from alphastomics.train.clocks import keyed_rng

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.data import Batch
    from alphastomics.diffusion import MaskingConfig

PURPOSE = 30


class Masks(NamedTuple):
    """True where an entry is masked.

    Attributes
    ----------
    expression
        (B, N, G), or None when nothing is masked in any context.
    position
        (B, N, D), likewise.
    """

    expression: Tensor | None = None
    position: Tensor | None = None


def draw_masks(
    config: MaskingConfig,
    batch: Batch,
    x_expr: Tensor,
    x_pos: Tensor,
    measured: Tensor,
    t_expr: Tensor,
    t_pos: Tensor,
    *,
    share: float,
) -> Masks:
    """Draw the masks of a batch from generators keyed by (seed, epoch, context).

    Parameters
    ----------
    config
        What is masked.
    batch
        Real cells and keys.
    x_expr, x_pos
        Clean values (B, N, G) and (B, N, D).
    measured
        Genes (B, G) that have a value.
    t_expr, t_pos
        Clocks (B,); at 1 there is nothing that could be masked.
    share
        Share of the ratios, see :meth:`~alphastomics.diffusion.MaskingConfig.share`.
    """
    rngs = [keyed_rng(key, PURPOSE) for key in batch.key.cpu().numpy()]
    chosen = [rng.random() < config.masking_probability for rng in rngs]
    axes = torch.ones_like(x_pos[:, 0], dtype=torch.bool)

    def draw(value: Tensor, features: Tensor, t: Tensor, ratio: float) -> Tensor:
        masked = [
            rng if take and clock < 1 else None for rng, take, clock in zip(rngs, chosen, t.tolist(), strict=True)
        ]
        return draw_mask(value, batch.mask, features, ratio=share * ratio, strategy=config.mask_strategy, rngs=masked)

    return Masks(
        draw(x_expr, measured, t_expr, config.expression_mask_ratio),
        draw(x_pos, axes, t_pos, config.position_mask_ratio),
    )
