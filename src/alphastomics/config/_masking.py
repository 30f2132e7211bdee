"""Settings of masked training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from alphastomics.config._setting import check, setting

MaskStrategy = Literal["random", "block", "structured"]
_MASKED = ("enable_masking", True)


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Which entries are masked in training, for a model with ``enable_masking``.

    Parameters
    ----------
    mask_strategy
        Which entries are masked. ``random``: uniformly at random. ``block``: a block of consecutive measured genes, or of axes,
        in every cell. ``structured``: the entries with the largest absolute values; ties are broken at random.
    expression_mask_ratio
        Fraction of the expression entries of a context that is masked.
    position_mask_ratio
        Fraction of the coordinates of a context that is masked.
    masking_probability
        Probability that a context is masked. The other contexts have the same kind of input as in sampling.
    initial_mask_share
        Fraction of both ratios that applies at the first step.
    mask_ramp_steps
        Number of optimizer steps over which the ratios increase linearly to their full values.

    Raises
    ------
    ValueError
        If a value is out of range or the strategy is unknown.
    """

    SECTION: ClassVar[str] = "masking"

    mask_strategy: MaskStrategy = setting("random", requires=_MASKED)
    expression_mask_ratio: float = setting(0.3, ge=0, le=1, requires=_MASKED)
    position_mask_ratio: float = setting(0.33, ge=0, le=1, requires=_MASKED)
    masking_probability: float = setting(0.5, ge=0, le=1, requires=_MASKED)
    initial_mask_share: float = setting(0.0, ge=0, le=1, requires=_MASKED)
    mask_ramp_steps: int = setting(0, ge=0, requires=_MASKED)

    def __post_init__(self) -> None:
        check(self)

    def share(self, step: int) -> float:
        """Fraction of the ratios that applies at an optimizer step, counted from 0."""
        if step >= self.mask_ramp_steps:
            return 1.0
        return self.initial_mask_share + (1 - self.initial_mask_share) * step / self.mask_ramp_steps
