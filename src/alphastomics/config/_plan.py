r"""Settings of the training plan: weights of the losses and the optimizer.

With :math:`\eta` = ``lr``, f = ``final_lr``, and s the completed fraction of the training, by steps or by time, whichever is larger,
the learning rate after the warmup is

.. math::

    \eta \left(f + (1 - f)\,\tfrac{1 + \cos \pi s}{2}\right), \qquad \eta\,(f + (1 - f)(1 - s)), \qquad \eta

for the schedules ``"cosine"``, ``"linear"`` and ``"constant"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from alphastomics.config._setting import check, setting

DistanceKind = Literal["mse", "drmsd", "clamped", "huber"]
LearningRateSchedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Loss weights and optimizer.

    Parameters
    ----------
    lr
        Learning rate of AdamW.
    weight_decay
        Weight decay of AdamW.
    warmup_steps
        Number of steps over which the learning rate increases to its full value.
    lr_schedule
        How the learning rate decreases after the warmup.
    final_lr
        Learning rate at the end of training, as a fraction of ``lr``; no effect if it is constant.
    ema_decay
        Decay of the moving average of the weights, which is used for sampling and saved.
    lambda_expression
        Weight of the expression loss.
    lambda_completion
        Weight of the completion loss, which compares the expression predicted from thinned counts of some of the genes with the
        complete measured expression.
    lambda_position
        Weight of the aligned loss of positions.
    lambda_distance
        Weight of half of the distance loss.
    distance_loss
        Error of the pairwise distances. ``mse``: mean squared error. ``drmsd``: its root, in time quadratic in the number of
        cells. ``clamped``: absolute error up to a threshold. ``huber``: squared error up to a threshold, then linear.
    distance_clamp
        Threshold of ``clamped`` and ``huber``, in model units.
    lambda_neighbor
        Weight of the contrastive loss of neighborhoods.
    lambda_layout
        Weight of the layout loss.
    lambda_fape
        Weight of the frame-aligned point error of ordered chains in three dimensions.
    moe_load_balance_loss_weight
        Weight of the balance loss of experts; typically 0.01 to 0.1.
    reconstruction_weight
        Weight of the loss of masked entries.
    max_loss_weight
        Upper bound of the weight 1 / sigma_t^2 of the diffusion loss.
    modality_dropout
        Probability that expression is absent in a training context that samples it. Without effect in mode ``expr_to_pos``.
    neighbor_width
        Width of a neighborhood in the contrastive loss, in model units per square root of dimension.
    layout_width
        Width of a neighborhood in the layout loss, in model units per square root of dimension.
    deformation
        Strength of the smooth deformation of training contexts with positions, which mode ``expr_to_pos`` does not have. By
        default it is derived from the number of cells.
    """

    SECTION: ClassVar[str] = "losses"

    lr: float = setting(1e-3, gt=0, key="training.learning_rate")
    weight_decay: float = setting(0.02, ge=0, key="training.weight_decay")
    warmup_steps: int = setting(100, ge=0, key="training.warmup_steps")
    lr_schedule: LearningRateSchedule = setting("cosine", key="training.lr_schedule")
    final_lr: float = setting(0.02, ge=0, le=1, key="training.final_lr")
    ema_decay: float = setting(0.998, ge=0, lt=1, key="training.ema_decay")
    lambda_expression: float = setting(1.0, ge=0)
    lambda_completion: float = setting(3.0, ge=0)
    lambda_position: float = setting(1.0, ge=0)
    lambda_distance: float = setting(1.0, ge=0)
    distance_loss: DistanceKind = "mse"
    distance_clamp: float = setting(1.0, gt=0, requires=("distance_loss", "clamped", "huber"))
    lambda_neighbor: float = setting(0.3, ge=0)
    lambda_layout: float = setting(1.0, ge=0)
    lambda_fape: float = setting(0.0, ge=0)
    moe_load_balance_loss_weight: float = setting(0.01, ge=0)
    reconstruction_weight: float = setting(0.5, ge=0)
    max_loss_weight: float = setting(25.0, gt=0)
    modality_dropout: float = setting(0.5, ge=0, le=1)
    neighbor_width: float = setting(0.15, gt=0)
    layout_width: float = setting(0.1, gt=0)
    deformation: float = setting(0.2, ge=0, key="augmentation.deformation", from_data=True)

    def __post_init__(self) -> None:
        check(self)

    @property
    def distance_threshold(self) -> float | None:
        """``distance_clamp`` if the distance loss has a threshold, otherwise None."""
        return self.distance_clamp if self.distance_loss in ("clamped", "huber") else None
