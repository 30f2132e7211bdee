"""Defaults by size and kind of the reference and by mode: steps, batches, augmentation, deformation, dropout, experts, attention.

With few cells, a network can recognize each cell by its exact counts and memorize its position instead of learning what cells
have in common. Gene dropout, thinning of counts and dropout of branches prevent this. Values other than
counts, log-normalized and binary ones need less of it. The measurements are in ``docs/design-notes.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alphastomics.config import CUDA_BATCH_SIZE, DEFAULT_BATCH_SIZE, DEFAULT_STEPS
from alphastomics.data import Augmentation

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from alphastomics.data import TissueSchema
    from alphastomics.diffusion import Mode

FEW_CELLS = 5000
MANY_CELLS, MOST_CELLS = 10_000, 100_000  # thresholds for more experts
FULL_CELLS = 16_384  # cells of a context above which full attention takes most of the time of a step
COMPOSITION = 5.0


def default_steps(mode: Mode) -> int:
    """Largest number of optimizer steps; half as many suffice if all contexts are placed, instead of about half of them."""
    return DEFAULT_STEPS // 2 if mode == "expr_to_pos" else DEFAULT_STEPS


def default_batch_size(device: torch.device) -> int:
    """Number of cells in a batch of a training on a device."""
    return CUDA_BATCH_SIZE if device.type == "cuda" else DEFAULT_BATCH_SIZE


def default_augmentation(schema: TissueSchema, n_cells: int) -> Augmentation:
    """Composition, gene dropout, thinning and gene noise for a reference of ``n_cells`` cells."""
    if not schema.is_detected:
        return Augmentation(gene_dropout=0.2, composition=COMPOSITION)
    gene_dropout, gene_noise = (0.8, 0.4) if n_cells < FEW_CELLS else (0.5, 0.2)
    thinning = 0.9 if schema.value_kind in (None, "counts", "binary") else 0.0
    return Augmentation(gene_dropout=gene_dropout, thinning=thinning, gene_noise=gene_noise, composition=COMPOSITION)


def default_deformation(n_cells: int) -> float:
    """Strength of the smooth deformation of contexts for a reference of ``n_cells`` cells.

    Specimens differ in shape by an amount that cannot be estimated from a reference of one or two of them. These values were
    chosen by the accuracy on one data set of each size.
    """
    return 0.1 if n_cells < FEW_CELLS else 0.2


def default_dropout(schema: TissueSchema, n_cells: int) -> float:
    """Dropout of the branches of the network for a reference of ``n_cells`` cells."""
    return 0.2 if n_cells < FEW_CELLS and schema.is_detected else 0.0


def advised_experts(n_cells: int) -> dict[str, int]:
    """Recommended ``num_experts`` and ``moe_top_k`` for a reference of ``n_cells`` cells.

    4 and 1 below 10,000 cells, 8 and 2 from 10,000 to 100,000, 16 and 2 above. Each expert is trained on the share
    ``moe_top_k / num_experts`` of the cells and memorizes them if they are few. With two thousand cells, fewer experts were
    more accurate than many, and a network without experts was the most accurate (``docs/results.md``).

    Parameters
    ----------
    n_cells
        Number of cells of the reference.

    Returns
    -------
    The two arguments by name.
    """
    if n_cells < MANY_CELLS:
        return {"num_experts": 4, "moe_top_k": 1}
    return {"num_experts": 8 if n_cells <= MOST_CELLS else 16, "moe_top_k": 2}


def advised_attention(n_cells: int, fits: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
    """Recommended ``attention`` and ``pair_features`` of :class:`~alphastomics.model.AlphaSTomics` for the size of contexts.

    The first of these that fits into memory: ``"full"`` attention, up to 16,384 cells, because its time grows with the square
    of their number; ``"neighbor"`` attention with ``"factorized"`` pair features; ``"neighbor"`` attention alone;
    ``"linear"`` attention. The last one is recommended if none fits.

    Parameters
    ----------
    n_cells
        Largest number of cells of a context.
    fits
        Function that returns whether a model with these arguments fits into memory.

    Returns
    -------
    The arguments by name.
    """
    near: dict[str, Any] = {"attention": "neighbor"}
    choices = [near | {"pair_features": "factorized"}, near, {"attention": "linear"}]
    if n_cells <= FULL_CELLS:
        choices.insert(0, {"attention": "full"})
    return next(filter(fits, choices), choices[-1])
