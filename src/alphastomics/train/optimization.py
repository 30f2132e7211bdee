r"""Optimizer (AdamW) and learning rate schedule.

.. math::

    \eta(n) = \eta_0 \min\Big(1, \frac{n + 1}{n_{\text{warmup}}}\Big) \big(f + (1 - f)\, c(s)\big), \qquad
    c(s) = \begin{cases} \tfrac12 (1 + \cos \pi s) & \text{cosine} \\ 1 - s & \text{linear} \\ 1 & \text{constant} \end{cases}

at step n, where s is the share of the training that is done, by steps or by time, whichever is larger, and f the ratio of the
final rate to the full rate.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from alphastomics.config import LearningRateSchedule, PlanConfig
    from alphastomics.nn import Denoiser

DECAYS: dict[LearningRateSchedule, Callable[[float], float]] = {
    "cosine": lambda s: 0.5 * (1 + math.cos(math.pi * s)),
    "linear": lambda s: 1 - s,
    "constant": lambda s: 1.0,
}


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient became NaN or infinite; the message names the step and the slices."""


def make_optimizer(module: Denoiser, config: PlanConfig, *, fused: bool = True) -> torch.optim.AdamW:
    """AdamW for all weights of the denoiser.

    With a gradient scaler it must not be ``fused``: Lightning leaves the gradients of a fused optimizer scaled when they are clipped.
    """
    return torch.optim.AdamW(
        module.parameters(), lr=config.lr, weight_decay=config.weight_decay, betas=(0.9, 0.99), fused=fused
    )


def learning_rate_factor(config: PlanConfig, step: int, progress: float) -> float:
    """Ratio of the learning rate at a step to the full rate, when the share ``progress`` of the training is done."""
    warm = min(1.0, (step + 1) / max(1, config.warmup_steps))
    return warm * (config.final_lr + (1 - config.final_lr) * DECAYS[config.lr_schedule](progress))


def override_settings(checkpoint: dict[str, Any], config: PlanConfig, *, fused: bool) -> None:
    """Write settings of the optimizer to a checkpoint, so that a training can be resumed at a lower rate and on another device."""
    new = config.lr
    for state, schedule in zip(checkpoint["optimizer_states"], checkpoint["lr_schedulers"], strict=True):
        (group,), (old,) = state["param_groups"], schedule["base_lrs"]
        group["fused"], schedule["base_lrs"] = fused, [new]
        if new != old:
            group["lr"], group["initial_lr"] = group["lr"] * new / old, new


def gradient_norm(weights: Iterable[Tensor]) -> Tensor:
    """Norm of the gradients of all weights; if they are sharded, all processes must call."""
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
