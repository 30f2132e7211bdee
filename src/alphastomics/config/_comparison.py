"""Settings of a comparison of configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from alphastomics.config._setting import check, setting

ComparisonMode = Literal["any", "expr_to_pos"]


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """Arguments of :func:`~alphastomics.tl.compare`, except for the data, the models and their training.

    Parameters
    ----------
    configurations
        Names of configurations: ``linear`` and ``gated`` (attention), ``linear_moe`` and ``gated_moe`` (4 experts, 2 per cell),
        ``gated_elementwise``, ``gated_no_qk_norm``, ``gated_moe_4_top_1``, ``gated_moe_8_top_2``, ``gated_moe_full``,
        ``gated_matched``, and ``linear_high_lr`` (three times the learning rate). By default all of these.
    seeds
        Seeds. Every configuration is trained once per seed, and all configurations of one seed before those of the next.
    held_out
        Names of slices to hold out of training and to score. By default the last by name, or a random fifth of the cells if
        there is only one slice.
    max_time
        Duration of each training, in seconds or as ``DD:HH:MM:SS``. By default 180 seconds, unless ``max_steps`` is given.
        Validation takes a few percent of it.
    max_steps
        Number of optimizer steps of each training, instead of a duration.
    mode
        Mode of the models. ``any``: positions, expression and sampled slices are scored. ``expr_to_pos``: only positions are.
    n_samples
        Number of samples of expression, whose mean is scored.
    n_steps
        Number of network evaluations per sample of expression and per sampled slice.
    max_cells
        Largest number of cells of a slice whose expression is sampled, and of a sampled slice.
    """

    configurations: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    held_out: tuple[str, ...] | None = None
    max_time: float | str | None = None
    max_steps: int | None = setting(None, ge=1)
    mode: ComparisonMode = "any"
    n_samples: int = setting(4, ge=1)
    n_steps: int = setting(10, ge=1)
    max_cells: int = setting(2000, ge=1)

    def __post_init__(self) -> None:
        check(self)
