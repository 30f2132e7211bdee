r"""How the losses of a plan are minimized: AdamW, and a learning rate that follows steps or time.

.. math::

    \eta(n) = \eta_0 \min\Big(1, \frac{n + 1}{n_{\text{warmup}}}\Big) \big(f + (1 - f)\, c(s)\big), \qquad
    c(s) = \begin{cases} \tfrac12 (1 + \cos \pi s) & \text{cosine} \\ 1 - s & \text{linear} \\ 1 & \text{constant} \end{cases}

at step n, where s is the share of the training that is done, by steps or by time, whichever is further, and f what is left
of the rate in the end.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch.distributed.tensor import DTensor

from alphastomics.train.callbacks import EpochSums
from alphastomics.train.distributed.processes import gather_objects, mean_over_processes

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
    from torch import Tensor

    from alphastomics.config import LearningRateSchedule, PlanConfig
    from alphastomics.nn import Denoiser
    from alphastomics.train.curriculum import LengthCurriculum

COURSES: dict[LearningRateSchedule, Callable[[float], float]] = {
    "cosine": lambda s: 0.5 * (1 + math.cos(math.pi * s)),
    "linear": lambda s: 1 - s,
    "constant": lambda s: 1.0,
}


class NonFiniteLossError(RuntimeError):
    """The loss or its gradient became NaN or infinite; the message names the step and the slices."""


class Optimization(pl.LightningModule):
    """Optimizer, schedule and clock of a training.

    Parameters
    ----------
    module
        The denoiser.
    config
        Rates and weights.
    slice_names
        Names of the slices, for messages.
    max_seconds
        Time the training may take; the learning rate then follows the clock on the wall as well as the steps.
    curriculum
        By which contexts grow, if they do.
    """

    def __init__(
        self,
        module: Denoiser,
        config: PlanConfig,
        *,
        slice_names: tuple[str, ...],
        max_seconds: float | None,
        curriculum: LengthCurriculum | None,
    ) -> None:
        super().__init__()
        self.module, self.config = module, config
        self.slice_names, self.max_seconds, self.curriculum = slice_names, max_seconds, curriculum
        self._started = time.monotonic()
        self._elapsed = 0.0  # seconds before the checkpoint that was resumed
        self.sums = EpochSums()
        self.last_look = -1  # epoch in which the layers were last looked at
        self.current: Tensor | tuple[int, ...] = ()  # slices of the batch that is being learned

    def on_fit_start(self) -> None:
        """Start the clock that the learning rate may follow, or let it go on."""
        self._started = time.monotonic() - self._elapsed

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the learning rate of the step to loggers, if there are any."""
        if self.trainer.loggers:
            self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], on_step=True, on_epoch=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the time that training has taken, and what it has logged in this epoch."""
        checkpoint["elapsed_seconds"] = time.monotonic() - self._started
        checkpoint["epoch_sums"], checkpoint["last_look"] = self.sums.of(self.trainer), self.last_look

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on at that time, and in that epoch."""
        self._elapsed = checkpoint["elapsed_seconds"]
        self.sums.bring(checkpoint.get("epoch_sums", []), self.trainer)
        self.last_look = checkpoint.get("last_look", -1)
        self._take_rates(checkpoint)

    def _take_rates(self, checkpoint: dict[str, Any]) -> None:
        """Learn at the rates that are asked for now: how else would a training go on that became NaN at others?"""
        now = [self.config.lr, self.config.min_distance_lr]
        for state, schedule in zip(checkpoint["optimizer_states"], checkpoint["lr_schedulers"], strict=True):
            before, schedule["base_lrs"] = schedule["base_lrs"], now
            for group, old, new in zip(state["param_groups"], before, now, strict=True):
                if new != old:
                    group["lr"], group["initial_lr"] = group["lr"] * new / old, new

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a gradient that is not finite, which a finite loss can have.

        With 16 bits the gradient is scaled until it overflows, and such steps are skipped: nothing to refuse.
        """
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            return
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self.check_finite("gradient norm", norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def check_finite(self, what: str, value: Tensor) -> None:
        """Raise :class:`NonFiniteLossError` if a value is not finite in one of the processes: in all of them alike."""
        mean = mean_over_processes(self.trainer, value.detach())
        if bool(mean.isfinite()):
            return
        own = {self.slice_names[int(i)] for i in self.current} if self.slice_names else set()
        own = set() if bool(value.isfinite()) else own
        names = sorted(set().union(*gather_objects(self.trainer, own)))
        message = (
            f"The {what} is {mean.item():g} at step {self.global_step} (slices: {', '.join(names) or 'unknown'}). "
            "The model keeps its last good weights. Lower plan_kwargs['lr'] or look for extreme values in these slices."
        )
        raise NonFiniteLossError(message)

    def progress(self) -> float:
        """Share of the training that is done, by steps or by time, whichever is further."""
        total = self.trainer.estimated_stepping_batches  # also asks for the loaders, where nobody has
        if self.curriculum is not None:
            done = self.curriculum.progress(self.trainer)
        else:
            done = self.global_step / total if total not in (0, float("inf")) and total > 0 else 0.0
        if self.max_seconds:
            done = max(done, self._seconds() / self.max_seconds)
        return min(1.0, done)

    def _seconds(self) -> float:
        """Time that training has taken; processes must agree on it, or their learning rates drift apart."""
        seconds = torch.tensor(time.monotonic() - self._started, device=self.device)
        return float(mean_over_processes(self.trainer, seconds))

    def _lr_factor(self, step: int) -> float:
        warm = min(1.0, (step + 1) / max(1, self.config.warmup_steps))
        left = COURSES[self.config.lr_schedule](self.progress())
        return warm * (self.config.final_lr + (1 - self.config.final_lr) * left)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with warm-up and a rate that follows :meth:`progress`."""
        others = [p for name, p in self.module.named_parameters() if not name.startswith("min_distance.")]
        min_distance = list(self.module.min_distance.parameters())
        groups: list[dict[str, Any]] = [{"params": others}, {"params": min_distance, "lr": self.config.min_distance_lr}]
        optimizer = torch.optim.AdamW(
            groups, lr=self.config.lr, weight_decay=self.config.weight_decay, betas=(0.9, 0.99)
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._lr_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
