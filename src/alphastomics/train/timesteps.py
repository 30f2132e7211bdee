r"""Draws for each context of a batch: timesteps, observed entries of expression, and masked entries.

Timesteps by mode (0: clean, 1: absent):

========================  =============================  =============================
mode                      t_expr                         t_pos
========================  =============================  =============================
``expr_to_pos``           0                              1 (absent)
``pos_to_expr``           1 (absent), U(0, 1), or 0      0, or 1 with t_expr 0
``joint``                 U(0, 1), 1, or 0 with t_pos 1  U(0, 1) or 1
``any``                   those of all of these
========================  =============================  =============================

Timesteps of 1 train the conditional mean, which is the first step of every sampler, and with ``t_expr`` = 0 the canonical frame.

Where expression is sampled, part of it is observed in 85 % of the contexts: whole cells (10 %), some genes of all cells (40 %), or
single entries (35 %), as in a section with few measured cells, a panel that lacks genes, or data with missing values. Genes and
entries have the largest share because completing cells takes longer to learn than predicting whole cells.

All draws are keyed by (seed, epoch, context), so that they do not depend on the division into batches and processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from alphastomics.diffusion import MIN_TIME
from alphastomics.diffusion.masking import draw_mask

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.data import Batch
    from alphastomics.diffusion import MaskingConfig, Mode

KIND, MASKING = 20, 30  # purposes of generators
FRAME_SHARE = 0.2  # share of the contexts of pos_to_expr that train the canonical frame
EXPR_TO_POS, POS_TO_EXPR = 0.25, 0.85  # cumulative shares of the parts of "any"; the rest is joint
NOTHING, CELLS, GENES = 0.15, 0.25, 0.65  # cumulative shares of the contexts; in the rest single entries are observed
CELL_SHARE = 0.02, 0.5  # range of the observed share of cells, log-uniform
GENE_SHARE = 0.3, 0.95  # range of the observed share of genes or entries, uniform


class Timesteps(NamedTuple):
    """Timesteps of one context."""

    expression: float
    position: float


def keyed_rng(key: NDArray[np.int64], purpose: int) -> np.random.Generator:
    """Random generator for a ``key`` (seed, epoch, context) and a ``purpose``, the same in every process."""
    return np.random.default_rng([*(int(k) for k in key), purpose])


def stratified_uniform(key: NDArray[np.int64], purpose: int) -> float:
    r"""A number in [0, 1) for the context ``key`` = (seed, epoch, index), from which its kind of timesteps is chosen.

    The additive recurrence of the golden ratio, :math:`(u + i (\sqrt 5 - 1) / 2) \bmod 1` with a random u for each epoch,
    spreads successive contexts evenly over the kinds, so that even a small batch contains each in proportion.
    """
    seed, epoch, index = (int(k) for k in key)
    start = np.random.default_rng([seed, epoch, purpose, KIND]).random()
    return float((start + index * (np.sqrt(5) - 1) / 2) % 1)


def draw_timesteps(
    mode: Mode,
    rng: np.random.Generator,
    *,
    modality_dropout: float,
    smallest: float = MIN_TIME,
    kind: float | None = None,
) -> Timesteps:
    """Draw the timesteps of one context.

    Parameters
    ----------
    mode
        What the model is trained to sample.
    rng
        Generator of this context.
    modality_dropout
        Probability that the sampled modality is absent (its timestep is 1).
    smallest
        Smallest timestep of noisy positions.
    kind
        Number in [0, 1) that chooses between clean, noisy and absent modalities; drawn uniformly when None.
    """
    drawn, u, v = rng.random(3)
    absent = modality_dropout
    kind = float(drawn) if kind is None else kind
    t_1, t_2 = float(smallest + (1 - smallest) * u), float(MIN_TIME + (1 - MIN_TIME) * v)
    if mode == "expr_to_pos":
        return Timesteps(0.0, 1.0)
    if mode == "pos_to_expr":
        if kind < FRAME_SHARE:
            return Timesteps(0.0, 1.0)
        return Timesteps(1.0 if kind < FRAME_SHARE + (1 - FRAME_SHARE) * absent else t_2, 0.0)
    if mode == "joint":
        if kind < absent / 2:
            return Timesteps(0.0, 1.0)
        return Timesteps(1.0, 1.0) if kind < absent * 0.6 else Timesteps(t_1 if kind < (1 + absent) / 2 else t_2, t_1)
    part: Mode = "expr_to_pos" if kind < EXPR_TO_POS else "pos_to_expr" if kind < POS_TO_EXPR else "joint"
    return draw_timesteps(part, rng, modality_dropout=absent, smallest=smallest)


def draw_observed(n_cells: int, n_genes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw the observed entries (N, G) of one context."""
    kind = rng.random()
    observed = np.zeros((n_cells, n_genes), dtype=bool)
    if kind < NOTHING:
        return observed
    if kind < CELLS:
        observed[rng.random(n_cells) < np.exp(rng.uniform(*np.log(CELL_SHARE)))] = True
        return observed
    share = rng.uniform(*GENE_SHARE)
    if kind < GENES:
        observed[:, rng.permutation(n_genes)[: int(share * n_genes)]] = True
        return observed
    return rng.random((n_cells, n_genes)) < share


class Masks(NamedTuple):
    """True where an entry is masked.

    Attributes
    ----------
    expression
        Shape (B, N, G); None if nothing is masked in any context.
    position
        Shape (B, N, D); None likewise.
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
        Shares and strategy.
    batch
        Contexts; their real cells and keys are used.
    x_expr, x_pos
        Clean values (B, N, G) and (B, N, D).
    measured
        Genes (B, G) that have a value.
    t_expr, t_pos
        Timesteps (B,); where one is 1, its modality is not masked.
    share
        Factor of the ratios, see :meth:`~alphastomics.diffusion.MaskingConfig.share`.
    """
    rngs = [keyed_rng(key, MASKING) for key in batch.key.cpu().numpy()]
    chosen = [rng.random() < config.masking_probability for rng in rngs]
    axes = torch.ones_like(x_pos[:, 0], dtype=torch.bool)

    def draw(value: Tensor, features: Tensor, t: Tensor, ratio: float) -> Tensor:
        masked = [
            rng if take and timestep < 1 else None for rng, take, timestep in zip(rngs, chosen, t.tolist(), strict=True)
        ]
        return draw_mask(value, batch.mask, features, ratio=share * ratio, strategy=config.mask_strategy, rngs=masked)

    return Masks(
        draw(x_expr, measured, t_expr, config.expression_mask_ratio),
        draw(x_pos, axes, t_pos, config.position_mask_ratio),
    )
