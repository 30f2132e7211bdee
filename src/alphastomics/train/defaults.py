"""Defaults that follow from the data: how much a reference of this size and kind has to be protected from being learned by heart.

Counts of few cells carry a fingerprint of every cell, and a network that can read it stops learning what cells have in
common. Dropping genes, thinning counts and dropping branches take the fingerprint away; values that are not counts have
little of it. ``docs/design-notes.md`` gives the measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alphastomics.data import Augmentation

if TYPE_CHECKING:
    from collections.abc import Callable

    from alphastomics.data import TissueSchema

FEW_CELLS = 5000
MANY_CELLS, MOST_CELLS = 10_000, 100_000  # from where on more experts have enough cells to learn from
FULL_CELLS = 16_384  # cells of a context, beyond which full attention takes most of the time of a step
COMPOSITION = 5.0
GRADIENT_NORM = 1.0  # largest, for any reference


def default_augmentation(schema: TissueSchema, n_cells: int) -> Augmentation:
    """Composition, gene dropout, thinning and gene noise for a reference of ``n_cells`` cells."""
    if schema.transform == "none":
        return Augmentation(gene_dropout=0.2, composition=COMPOSITION)
    if n_cells < FEW_CELLS:
        return Augmentation(gene_dropout=0.8, thinning=0.9, gene_noise=0.4, composition=COMPOSITION)
    return Augmentation(gene_dropout=0.5, thinning=0.5, gene_noise=0.2, composition=COMPOSITION)


def default_deformation(n_cells: int) -> float:
    """Strength of the smooth deformation of contexts for a reference of ``n_cells`` cells.

    Two embryos differ by more than sections of one cortex do, and nothing in a reference of one or two specimens tells which
    it will be. What is written was better with these on one data set of each kind.
    """
    return 0.1 if n_cells < FEW_CELLS else 0.2


def default_placement(schema: TissueSchema, n_cells: int) -> dict[str, Any]:
    """How the conditional mean is taken: ``n_views`` and ``refine`` of ``sample``, for a reference of ``n_cells`` cells.

    Values that are not counts place a cell more exactly than the neighborhood embedding resolves.
    """
    counts = schema.transform == "log1p"
    return {"n_views": 8 if counts and n_cells < FEW_CELLS else 1, "refine": counts}


def default_dropout(schema: TissueSchema, n_cells: int) -> float:
    """Dropout of the branches of the network for a reference of ``n_cells`` cells."""
    return 0.2 if n_cells < FEW_CELLS and schema.transform == "log1p" else 0.0


def advised_experts(n_cells: int) -> dict[str, int]:
    """Advice for ``num_experts`` and ``moe_top_k``: 4 and 1 below 10,000 cells, 8 and 2 up to 100,000, 16 and 2 beyond.

    10,000 cells are advised 8 experts, and so are exactly 100,000.

    An expert sees the share ``moe_top_k / num_experts`` of the cells, and with few cells learns them by heart. On two thousand
    cells fewer experts lost less than more did, and a dense network was better than any (``docs/design-notes.md``).
    """
    if n_cells < MANY_CELLS:
        return {"num_experts": 4, "moe_top_k": 1}
    return {"num_experts": 8 if n_cells <= MOST_CELLS else 16, "moe_top_k": 2}


def advised_attention(n_cells: int, fits: Callable[[dict[str, Any]], bool] = lambda _: True) -> dict[str, Any]:
    """Advice for ``attention`` and ``pair_features`` of :class:`~alphastomics.model.AlphaSTomics`, by the cells of a context.

    Full attention up to 16,384 cells: its memory is linear in them, its time is not. Beyond, the nearest cells one by one,
    all of them through low-rank features of pairs, and along with both ``"linear"`` attention.

    Parameters
    ----------
    n_cells
        Largest number of cells of a context.
    fits
        Whether a model with such arguments fits into memory. What takes least is advised where nothing does.
    """
    near: dict[str, Any] = {"attention": "neighbor"}
    choices = [near | {"pair_features": "factorized"}, near, {"attention": "linear"}]
    if n_cells <= FULL_CELLS:
        choices.insert(0, {"attention": "full"})
    return next(filter(fits, choices), choices[-1])
