"""A batch that a device takes in parts: gradients are accumulated over the parts before a step of the optimiser."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning.pytorch as pl

if TYPE_CHECKING:
    from alphastomics.train.datamodule import ContextDataModule


class MicroBatches(pl.Callback):
    """Lets Lightning accumulate as many batches as the data module makes of one, also where contexts change in length.

    ``accumulate_grad_batches`` of the trainer then counts whole batches.
    """

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remember how many batches are asked for."""
        self._asked = trainer.accumulate_grad_batches

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count parts."""
        datamodule: ContextDataModule = trainer.datamodule  # type: ignore[attr-defined]
        trainer.accumulate_grad_batches = self._asked * datamodule.batches_per_step

    # An epoch that is resumed in its midst does not begin.
    on_train_start = on_train_epoch_start = on_fit_start
