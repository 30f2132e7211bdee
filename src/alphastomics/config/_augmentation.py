"""Settings of the random changes to training contexts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alphastomics.config._setting import check, setting


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes to training contexts.

    By default, :meth:`~alphastomics.model.AlphaSTomics.train` derives the values from the number and kind of the cells.

    Parameters
    ----------
    gene_dropout
        Largest fraction of the measured genes that are dropped from a context; the fraction r is drawn uniformly per context.
        Dropped genes are set to 0 and marked as unmeasured. The others are divided by sqrt(1 - r), which preserves the variance
        of a sum over genes.
    thinning
        Largest fraction of the counts that are removed from a context; the fraction is drawn uniformly per context.
    gene_noise
        Standard deviation, in network units, of a random gain and a random offset of each gene per context, which imitate
        differences between specimens or between runs of an instrument.
    composition
        How strongly the contexts of a slice differ in composition. Cells are divided into contexts by a smooth random field of
        unit variance plus unit noise; this is the largest factor of the field, which is drawn uniformly per slice and epoch.
        With 0, every context is a uniform random sample of its slice. Only for contexts of kind ``subset``.
    rotate
        Rotate and reflect positions at random, unless all slices share a frame.


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
