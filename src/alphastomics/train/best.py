"""The best average of the weights that validation has seen, where training stops early."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from alphastomics.train.sharding import at_rest, spread_as, whole

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.train.ema import MovingAverage

logger = logging.getLogger(__name__)


class BestAverage(pl.Callback):
    """Keeps the moving average with the lowest loss, and leaves it in the module when training ends in any way.

    It is looked at when an epoch ends, as by early stopping. The state of training goes on with the last average.

    Parameters
    ----------
    ema
        Keeper of the average, which comes before this one among the callbacks.
    monitor
        Name of the loss.
    """

    def __init__(self, ema: MovingAverage, monitor: str) -> None:
        self.ema, self.monitor = ema, monitor
        self.lowest, self.epoch = float("inf"), -1
        self.weights: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Spread the average that a checkpoint brought as the weights are."""
        if self.weights:
            self.weights = [spread_as(old, new) for old, new in zip(self.weights, at_rest(pl_module), strict=True)]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the average if its loss is the lowest so far."""
        value = trainer.callback_metrics.get(self.monitor)
        if value is not None and float(value) < self.lowest:
            self.lowest, self.epoch = float(value), trainer.current_epoch
            self.weights = [average.clone() for average in self.ema.average]

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the best average in the module."""
        self.finish(pl_module)

    def finish(self, plan: pl.LightningModule) -> None:
        """Leave the best average in the module, once; to be called after the keeper of the last one has left that."""
        if not self.weights:
            return
        self.ema.average, self.weights = self.weights, []
        self.ema.finish(plan)
        logger.info("The model keeps its weights after epoch %d: %s was %.4g.", self.epoch, self.monitor, self.lowest)

    def state_dict(self) -> dict[str, Any]:
        """The best average and its loss, for a checkpoint; all processes must ask."""
        return {"lowest": self.lowest, "epoch": self.epoch, "weights": [whole(value) for value in self.weights]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the best average of a checkpoint."""
        self.lowest, self.epoch, self.weights = (state_dict[name] for name in ("lowest", "epoch", "weights"))
