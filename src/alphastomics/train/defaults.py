"""Defaults that follow from the data: how much a reference of this size and kind has to be protected from being learned by heart.

Counts of few cells carry a fingerprint of every cell, and a network that can read it stops learning what cells have in
common. Dropping genes, thinning counts and dropping branches take the fingerprint away; values that are not counts have
little of it. ``docs/design-notes.md`` gives the measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alphastomics.data import Augmentation

if TYPE_CHECKING:
    from alphastomics.data import TissueSchema

FEW_CELLS = 5000
COMPOSITION = 5.0


def default_augmentation(schema: TissueSchema, n_cells: int) -> Augmentation:
    """Composition, gene dropout, thinning and gene noise for a reference of ``n_cells`` cells."""
    if schema.transform == "none":
        return Augmentation(gene_dropout=0.2, composition=COMPOSITION)
    if n_cells < FEW_CELLS:
        return Augmentation(gene_dropout=0.8, thinning=0.9, gene_noise=0.4, composition=COMPOSITION)
    return Augmentation(gene_dropout=0.5, thinning=0.5, gene_noise=0.2, composition=COMPOSITION)


def default_n_views(schema: TissueSchema, n_cells: int) -> int:
    """Views over which the conditional mean is averaged, for a model of a reference of ``n_cells`` cells."""
    return 8 if n_cells < FEW_CELLS and schema.transform == "log1p" else 1


def default_dropout(schema: TissueSchema, n_cells: int) -> float:
    """Dropout of the branches of the network for a reference of ``n_cells`` cells."""
    return 0.2 if n_cells < FEW_CELLS and schema.transform == "log1p" else 0.0
