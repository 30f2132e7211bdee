r"""Draws for each context of a batch: timesteps, observed entries of expression, and masked entries.

Timesteps of a context (0: clean, 1: absent):

==============================  ================  ==========
part                            t_expr            t_pos
==============================  ================  ==========
placement                       0                 1 (absent)
expression from positions       1 (absent)        0
expression in reverse steps     U(0, 1)           0
==============================  ================  ==========

``mode="expr_to_pos"`` trains the first part only, ``"any"`` all of them. ``"pos_to_expr"`` and ``"joint"``, which sample expression at
given positions, train the first part for the canonical frame. Timesteps of 1 train the conditional mean, which is the first
step of every sampler.

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
    from alphastomics.data._draws import Draws
    from alphastomics.diffusion import MaskingConfig, Mode

KIND, MASKING = 20, 30  # purposes of generators
PLACED: dict[Mode, float] = {"expr_to_pos": 1.0, "pos_to_expr": 0.2, "joint": 0.2, "any": 0.52}
"""Mode -> share of the contexts of placement."""
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
    mode: Mode, rng: np.random.Generator, *, modality_dropout: float, kind: float | None = None
) -> Timesteps:
    """Draw the timesteps of one context.

    Parameters
    ----------
    mode
        What the model is trained to sample.
    rng
        Generator of this context.
    modality_dropout
        Probability that expression is absent where it is sampled.
    kind
        Number in [0, 1) that chooses the part; drawn uniformly when None.
    """
    drawn, u = rng.random(2)
    kind = float(drawn) if kind is None else kind
    placed = PLACED[mode]
    if kind < placed:
        return Timesteps(0.0, 1.0)
    if kind < placed + (1 - placed) * modality_dropout:
        return Timesteps(1.0, 0.0)
    return Timesteps(float(MIN_TIME + (1 - MIN_TIME) * u), 0.0)


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
    draws: Draws,
    *,
    share: float,
) -> Masks:
    """Draw the masks of a batch from generators keyed by (seed, epoch, context).

    Parameters
    ----------
    config
        Shares and strategy.
    batch
        Contexts; their real cells are used.
    x_expr, x_pos
        Clean values (B, N, G) and (B, N, D).
    measured
        Genes (B, G) that have a value.
    draws
        Keys and timesteps of the contexts; where a timestep is 1, its modality is not masked.
    share
        Factor of the ratios, see :meth:`~alphastomics.diffusion.MaskingConfig.share`.
    """
    rngs = [keyed_rng(key, MASKING) for key in draws.key]
    chosen = [rng.random() < config.masking_probability for rng in rngs]
    axes = torch.ones_like(x_pos[:, 0], dtype=torch.bool)

    def draw(value: Tensor, features: Tensor, t: Tensor, ratio: float) -> Tensor:
        masked = [
            rng if take and timestep < 1 else None for rng, take, timestep in zip(rngs, chosen, t.tolist(), strict=True)
        ]
        return draw_mask(value, batch.mask, features, ratio=share * ratio, strategy=config.mask_strategy, rngs=masked)

    return Masks(
        draw(x_expr, measured, draws.t_expr, config.expression_mask_ratio),
        draw(x_pos, axes, draws.t_pos, config.position_mask_ratio),
    )
