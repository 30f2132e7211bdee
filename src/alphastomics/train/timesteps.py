r"""What is drawn for each context of a batch: its timesteps, its observed expression, its masks.

Timesteps by mode:

========================  =============================  =============================
mode                      t_expr                         t_pos
========================  =============================  =============================
``expr_to_pos``           0                              1 (absent) or U(0, 1)
``pos_to_expr``           1 (absent), U(0, 1), or 0      0, or 1 with t_expr 0
``joint``                 U(0, 1), 1, or 0 with t_pos 1  U(0, 1) or 1
``any``                   0, U(0, 1) or 1                0, U(0, 1) or 1
========================  =============================  =============================

The mass on 1 trains the conditional mean, the first step of every sampler, and (with ``t_expr`` = 0) the canonical frame.

While the rest of a context is sampled, some expression is observed: whole cells, some genes of all cells, or single values, as
in a section with few measured cells, a panel that lacks genes, or data with missing values. Completing cells takes longer to
learn than predicting whole ones, so three quarters of the contexts have some of their genes observed.

All draws are keyed by context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from alphastomics.diffusion import SMALLEST
from alphastomics.diffusion.masking import draw_mask

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.data import Batch
    from alphastomics.diffusion import MaskingConfig, Mode

_KIND = 20
FRAME_SHARE = 0.2  # of the contexts of pos_to_expr: those that teach the canonical frame
EXPR_TO_POS, POS_TO_EXPR = 0.25, 0.85  # cumulative shares of the parts of "any"; the rest is joint


class Timesteps(NamedTuple):
    """Timesteps of one context."""

    expression: float
    position: float


def keyed_rng(key: NDArray[np.int64], purpose: int) -> np.random.Generator:
    """A generator that depends on (seed, epoch, context) and on the purpose alone, never on the process."""
    return np.random.default_rng([*(int(k) for k in key), purpose])


def spread_kind(key: NDArray[np.int64], purpose: int) -> float:
    """A number in [0, 1) for the context ``key`` = (seed, epoch, index) that decides what kind of state it trains.

    Additive recurrence with the golden ratio: contexts that follow each other in an epoch are spread evenly over the
    kinds, so that a batch of a few contexts holds a fair share of each.
    """
    seed, epoch, index = (int(k) for k in key)
    start = np.random.default_rng([seed, epoch, purpose, _KIND]).random()
    return float((start + index * (np.sqrt(5) - 1) / 2) % 1)


def draw_timesteps(
    mode: Mode, rng: np.random.Generator, *, absent: float, smallest: float = SMALLEST, kind: float | None = None
) -> Timesteps:
    """Draw the timesteps of one context.

    Parameters
    ----------
    mode
        What the model is trained for.
    rng
        Generator of this context.
    absent
        Probability that the modality to be sampled is absent altogether (its timestep stands at 1).
    smallest
        Smallest time of a position timestep that runs.
    kind
        Uniform number that decides which timesteps run; drawn when None.
    """
    drawn, u, v = rng.random(3)
    kind = float(drawn) if kind is None else kind
    t_1, t_2 = float(smallest + (1 - smallest) * u), float(SMALLEST + (1 - SMALLEST) * v)
    if mode == "expr_to_pos":
        return Timesteps(0.0, 1.0 if kind < absent else t_1)
    if mode == "pos_to_expr":
        if kind < FRAME_SHARE:
            return Timesteps(0.0, 1.0)
        return Timesteps(1.0 if kind < FRAME_SHARE + (1 - FRAME_SHARE) * absent else t_2, 0.0)
    if mode == "joint":
        if kind < absent / 2:
            return Timesteps(0.0, 1.0)
        return Timesteps(1.0, 1.0) if kind < absent * 0.6 else Timesteps(t_1 if kind < (1 + absent) / 2 else t_2, t_1)
    part: Mode = "expr_to_pos" if kind < EXPR_TO_POS else "pos_to_expr" if kind < POS_TO_EXPR else "joint"
    return draw_timesteps(part, rng, absent=absent, smallest=smallest)


NOTHING, CELLS, GENES = 0.15, 0.25, 0.65  # cumulative shares of the contexts; in the rest single entries are observed
CELL_SHARE = 0.02, 0.5  # of the cells, evenly on a logarithmic scale
GENE_SHARE = 0.3, 0.95  # of the genes, or of the entries


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
        Timesteps (B,); at 1 nothing is masked.
    share
        Share of the ratios, see :meth:`~alphastomics.diffusion.MaskingConfig.share`.
    """
    rngs = [keyed_rng(key, PURPOSE) for key in batch.key.cpu().numpy()]
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
