"""Settings of the random changes to training contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alphastomics.config._setting import check, setting


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes to training contexts.

    :meth:`~alphastomics.model.AlphaSTomics.train` chooses the values by the number and kind of the cells unless they are given.

    Parameters
    ----------
    gene_dropout
        Largest fraction r of the measured genes that a context loses, drawn uniformly per context. Lost genes become 0 and
        unmeasured; the others are divided by sqrt(1 - r), which keeps the variance of a sum over genes.
    thinning
        Largest fraction of the counts that a context loses, drawn uniformly per context.
    gene_noise
        Standard deviation, in network units, of a gain and an offset that each gene receives per context, like those between
        two specimens or two runs of an instrument.
    composition
        How strongly the contexts of a slice differ in composition: largest strength with which a random smooth field over the
        slice, of unit variance, gathers cells into contexts, drawn uniformly per slice and epoch. With 0 every context is a
        fair sample of its slice. Only for contexts of kind ``subset``.
    rotate
        Rotate or reflect positions at random, unless all slices share a frame.

    Raises
    ------
    ValueError
        If a value is out of range.
    """

    SECTION: ClassVar[str] = "augmentation"

    gene_dropout: float = setting(0.5, ge=0, lt=1, from_data=True)
    thinning: float = setting(0.0, ge=0, lt=1, from_data=True)
    gene_noise: float = setting(0.0, ge=0, from_data=True)
    composition: float = setting(0.0, ge=0, from_data=True)
    rotate: bool = True

    def __post_init__(self) -> None:
        check(self)
