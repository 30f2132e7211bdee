"""What a training is made of, as plain values: weights of losses, optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from alphastomics.diffusion.distances import DistanceKind

Course = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """Loss weights and optimization.

    Parameters
    ----------
    lr, weight_decay
        Of AdamW; the rate warms up over ``warmup_steps`` and then follows ``lr_schedule``.
    min_distance_lr
        Rate of the minimum-distance network, which takes the same course.
    warmup_steps
        Steps until the full rate.
    lr_schedule
        Course of the rate as the share s of the training that is done goes from 0 to 1, by steps or by time, whichever is
        further: ``"cosine"``, ``lr`` * (f + (1 - f) (1 + cos(pi s)) / 2); ``"linear"``, ``lr`` * (f + (1 - f) (1 - s));
        ``"constant"``, ``lr``.
    final_lr
        The share f of the rate that is left in the end; of no effect on a constant one.
    absent
        Share of contexts in which the modality to be sampled is absent altogether.
    lambda_expression, lambda_position, lambda_distance, lambda_neighbor, lambda_layout
        Weights of the losses; ``lambda_position`` weighs the aligned and the diffusion loss alike.
    distance_loss
        Error of the pairwise distances: ``"mse"``, ``"drmsd"``, its root, whose time grows with the square of the cells;
        ``"clamped"`` or ``"huber"``, which limit the weight of large errors. See :mod:`alphastomics.diffusion.distances`.
    distance_clamp
        Error of a distance, in model units, at which ``"clamped"`` and ``"huber"`` begin to limit it.
    lambda_completion
        Weight of the loss of expression that is given, thinned and with genes missing, and asked for in full.
    neighbor_width, layout_width
        Widths of the neighborhoods of the contrastive and of the layout loss, in model units per square root of
        dimension.
    deformation
        Strength of the smooth deformation of diffusion contexts, see :mod:`alphastomics.diffusion.deformation`;
        :meth:`~alphastomics.model.AlphaSTomics.train` chooses it by the number of cells.
    lambda_min_distance
        Weight of the minimum-distance loss; its network shares nothing with the rest.
    lambda_fape
        Weight of the frame-aligned point error of ordered chains in three dimensions, see ``chains/_fape.py``.
    moe_load_balance_loss_weight
        Weight lambda_b of the loss that keeps experts in even use, see ``nn/experts.py``; 0.01 to 0.1.
    reconstruction_weight
        Weight of the loss of masked entries, where there are any.
    max_loss_weight
        Ceiling of the weight 1 / sigma_t^2 of the diffusion loss.
    ema_decay
        Decay of the moving average of the weights, which is what samples and what is kept.

    Raises
    ------
    ValueError
        If the schedule or the distance loss is unknown, or ``distance_clamp`` is not positive or has no effect.
    """

    lr: float = 1e-3
    weight_decay: float = 0.02
    warmup_steps: int = 100
    lr_schedule: Course = "cosine"
    final_lr: float = 0.02
    absent: float = 0.5
    lambda_expression: float = 1.0
    lambda_completion: float = 3.0
    lambda_position: float = 1.0
    lambda_distance: float = 1.0
    distance_loss: DistanceKind = "mse"
    distance_clamp: float = 1.0
    lambda_neighbor: float = 0.3
    lambda_layout: float = 1.0
    lambda_min_distance: float = 1.0
    lambda_fape: float = 0.0
    moe_load_balance_loss_weight: float = 0.01
    reconstruction_weight: float = 0.5
    neighbor_width: float = 0.15
    layout_width: float = 0.1
    deformation: float = 0.2
    max_loss_weight: float = 25.0
    ema_decay: float = 0.998
    min_distance_lr: float = 5e-3

    def __post_init__(self) -> None:
        if self.lr_schedule not in get_args(Course):
            raise ValueError(
                f"lr_schedule={self.lr_schedule!r} is unknown; choose from {', '.join(map(repr, get_args(Course)))}"
            )
        if self.distance_loss not in get_args(DistanceKind):
            choices = ", ".join(map(repr, get_args(DistanceKind)))
            raise ValueError(f"distance_loss={self.distance_loss!r} is unknown; choose from {choices}")
        if self.distance_clamp <= 0:
            raise ValueError(f"distance_clamp={self.distance_clamp} must be positive")
        if self.distance_clamp != 1.0 and self.distance_threshold is None:
            raise ValueError(
                f"distance_clamp={self.distance_clamp} has no effect with distance_loss={self.distance_loss!r}; "
                "choose 'clamped' or 'huber'"
            )

    @property
    def distance_threshold(self) -> float | None:
        """``distance_clamp`` where the distance loss has a threshold, else None."""
        return self.distance_clamp if self.distance_loss in ("clamped", "huber") else None
