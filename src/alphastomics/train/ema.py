r"""Exponential moving average of the weights; with early stopping, the best average is kept.

.. math:: \bar\theta \leftarrow \beta_n \bar\theta + (1 - \beta_n)\,\theta, \qquad \beta_n = \min(\beta, \tfrac{1 + n}{10 + n})

after step n. If weights are sharded, each process averages its shard.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from alphastomics.train.callbacks import OptimizerStepCallback
from alphastomics.train.distributed.sharding import distribute_like, full_tensor, local_params, to_local

if TYPE_CHECKING:
    from torch import Tensor


logger = logging.getLogger(__name__)


def update_average(average: list[Tensor], weights: list[Tensor], n_updates: int, decay: float) -> None:
    """Update an average in place, after ``n_updates`` updates."""
    get_ema_multi_avg_fn(min(decay, (1 + n_updates) / (10 + n_updates)))(average, weights, n_updates)


class MovingAverage(OptimizerStepCallback):
    """Updates the average, validates with it, and copies it into the module when training ends, fails or is interrupted.

    Parameters
    ----------
    decay
        The decay beta.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.n_updates = 0
        self.average: list[Tensor] = []
        self._swapped = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the current weights, or from the average of a checkpoint."""
        weights = local_params(pl_module)
        if not self.average:
            self.average = [weight.clone() for weight in weights]
        else:
            self.average = [distribute_like(old, new) for old, new in zip(self.average, weights, strict=True)]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start again, because some strategies restore the average after on_fit_start."""
        super().on_train_start(trainer, pl_module)
        self.on_fit_start(trainer, pl_module)

    @torch.no_grad()
    def on_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Update the average."""
        update_average(to_local(self.average), to_local(local_params(pl_module)), self.n_updates, self.decay)
        self.n_updates += 1

    @torch.no_grad()
    def swap(self, plan: pl.LightningModule) -> None:
        """Exchange the weights of the module and the average."""
        for weight, average in zip(to_local(local_params(plan)), to_local(self.average), strict=True):
            old = weight.clone()
            weight.copy_(average)
            average.copy_(old)
        self._swapped = not self._swapped

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exchange the weights and the average for validation."""
        if self.average:
            self.swap(pl_module)

    on_validation_end = on_validation_start

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the average into the module."""
        self.finish(pl_module)

    def finish(self, plan: pl.LightningModule) -> None:
        """Copy the average into the module, once; during validation it is already there."""
        if self.average:
            if not self._swapped:
                self.swap(plan)
            self.average, self._swapped = [], False

    def state_dict(self) -> dict[str, Any]:
        """The average and its number of updates; all processes must call."""
        return {"average": [full_tensor(value) for value in self.average], "n_updates": self.n_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the average of a checkpoint."""
        self.average, self.n_updates = state_dict["average"], state_dict["n_updates"]


class BestAverage(pl.Callback):
    """Keeps the moving average with the lowest loss ``monitor``, and copies it into the module when training ends.

    Losses are compared at the end of each epoch, as in early stopping. Training continues with the last average. ``ema`` must
    come before this callback in the trainer's list.
    """

    def __init__(self, ema: MovingAverage, monitor: str) -> None:
        self.ema, self.monitor = ema, monitor
        self.lowest, self.epoch = float("inf"), -1
        self.weights: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Shard the average of a checkpoint like the weights."""
        if self.weights:
            self.weights = [
                distribute_like(old, new) for old, new in zip(self.weights, local_params(pl_module), strict=True)
            ]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the average if its loss is the lowest so far."""
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None and float(value) < self.lowest:
            self.lowest, self.epoch = float(value), trainer.current_epoch
            self.weights = [average.clone() for average in self.ema.average]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the best average into the module."""
        self.finish(pl_module)

    def finish(self, plan: pl.LightningModule) -> None:
        """Copy the best average into the module, once; call after :meth:`MovingAverage.finish`."""
        if not self.weights:
            return
        self.ema.average, self.weights = self.weights, []
        self.ema.finish(plan)
        logger.info("The model keeps its weights after epoch %d: %s was %.4g.", self.epoch, self.monitor, self.lowest)

    def state_dict(self) -> dict[str, Any]:
        """The best average, its loss and its epoch; all processes must call."""
        return {"lowest": self.lowest, "epoch": self.epoch, "weights": [full_tensor(value) for value in self.weights]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best average of a checkpoint."""
        self.lowest, self.epoch, self.weights = (state_dict[name] for name in ("lowest", "epoch", "weights"))


def finish_averages(trainer: pl.Trainer, plan: pl.LightningModule) -> None:
    """Copy the moving average, or the best one, into the module."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (MovingAverage, BestAverage)):
            callback.finish(plan)
