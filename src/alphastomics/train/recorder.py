"""Learning curves and step times of a training, to compare models."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import lightning.pytorch as pl
import torch

from alphastomics.train.distributed.processes import mean_over_processes
from alphastomics.train.draws import VALIDATION
from alphastomics.train.ema import MovingAverage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alphastomics.data import Batch
    from alphastomics.train.plan import TrainingPlan

N_POINTS = 15  # of a learning curve, about


class CurvePoint(NamedTuple):
    """One point of a learning curve.

    Attributes
    ----------
    step
        Number of steps of the optimizer so far.
    seconds
        Time since the start of training, including validation.
    train_loss
        Mean loss over the epochs since the last point.
    validation_loss
        Loss of the averaged weights on the held-out batches; NaN without held-out batches.
    """

    step: int
    seconds: float
    train_loss: float
    validation_loss: float


class TrainingRecorder(pl.Callback):
    """Records losses at points that are spread evenly over a training, and the time of every step.

    Both losses exclude the balance loss, because only networks with experts have it. Validation uses the same contexts and
    the same noise at every point. Points are at the ends of epochs.

    Parameters
    ----------
    batches
        Held-out contexts without augmentation.
    """

    def __init__(self, batches: Sequence[Batch] = ()) -> None:
        self.batches = batches
        self.points: list[CurvePoint] = []
        self._steps: list[tuple[float, float]] = []
        self._epochs: list[tuple[int, float]] = []  # steps and loss of the epochs since the last point
        self._step_start = self._start = (0.0, 0.0)
        self._epoch_start = 0

    @property
    def step_seconds(self) -> float:
        """Median time of a step in seconds."""
        return median(step[0] for step in self._steps) if self._steps else float("nan")

    @property
    def step_processor_seconds(self) -> float:
        """Median processor time of a step in seconds, summed over the threads of this process."""
        return median(step[1] for step in self._steps) if self._steps else float("nan")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start measuring time."""
        self._start = _read_clocks()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Store the first step of the epoch."""
        self._epoch_start = trainer.global_step

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        """Read the clocks before a step."""
        self._step_start = _read_clocks()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, _: int
    ) -> None:
        """Add the time of the step."""
        wall, processor = _read_clocks()
        self._steps.append((wall - self._step_start[0], processor - self._step_start[1]))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Store the loss of the epoch, and add a point if one is due."""
        plan: TrainingPlan = pl_module  # type: ignore[assignment]
        values = trainer.callback_metrics
        loss = float(values["train_loss"])
        if "train_balance" in values:
            loss -= plan.config.moe_load_balance_loss_weight * float(values["train_balance"])
        self._epochs.append((trainer.global_step - self._epoch_start, loss))
        if plan.progress() * N_POINTS >= len(self.points) + 1:
            self._add(trainer, plan)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the last point."""
        if self._epochs:
            self._add(trainer, pl_module)  # type: ignore[arg-type]

    def _add(self, trainer: pl.Trainer, plan: TrainingPlan) -> None:
        n_steps = sum(steps for steps, _ in self._epochs)
        train_loss = sum(steps * loss for steps, loss in self._epochs) / max(1, n_steps)
        self._epochs = []
        validation_loss = self._validate(trainer, plan)
        seconds = _read_clocks()[0] - self._start[0]
        self.points.append(CurvePoint(trainer.global_step, seconds, train_loss, validation_loss))

    @torch.no_grad()
    def _validate(self, trainer: pl.Trainer, plan: TrainingPlan) -> float:
        if not self.batches:
            return float("nan")
        average = next(c for c in trainer.callbacks if isinstance(c, MovingAverage))  # type: ignore[attr-defined]
        average.swap(plan)
        plan.eval()
        try:
            losses = [self._loss(trainer, plan, batch) for batch in self.batches]
        finally:
            plan.train()
            average.swap(plan)
        return sum(losses) / len(losses)

    @staticmethod
    def _loss(trainer: pl.Trainer, plan: TrainingPlan, batch: Batch) -> float:
        batch = trainer.strategy.batch_to_device(batch, plan.device)
        with trainer.precision_plugin.val_step_context():
            losses = plan.objective.losses(batch, purpose=VALIDATION)
        losses.pop("balance", None)
        count = mean_over_processes(trainer, batch.mask.any(1).float().sum())
        return float(plan.objective.total(losses, batch, count))


def _read_clocks() -> tuple[float, float]:
    """Wall time, and processor time of this process, in seconds."""
    return time.perf_counter(), time.process_time()
