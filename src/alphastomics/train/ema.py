r"""Moving average of the weights.

.. math:: \bar\theta \leftarrow \beta_n \bar\theta + (1 - \beta_n)\,\theta, \qquad \beta_n = \min(\beta, \tfrac{1 + n}{10 + n})

after step n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

if TYPE_CHECKING:
    from torch import Tensor


class MovingAverage(pl.Callback):
    """Keeps the average, validates with it, and leaves it in the module when training ends in any way.

    Parameters
    ----------
    decay
        The decay beta.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.n_updates = 0
        self.average: list[Tensor] = []
        self._last_step = 0
        self._swapped = False

    @staticmethod
    def _weights(plan: pl.LightningModule) -> list[Tensor]:
        return [parameter.data for parameter in plan.parameters()]

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the weights as they are, unless a checkpoint brought an average."""
        weights = self._weights(pl_module)
        if not self.average:
            self.average = [weight.clone() for weight in weights]
        else:
            self.average = [old.to(new.device) for old, new in zip(self.average, weights, strict=True)]
        self._last_step = trainer.global_step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count on from the step of a checkpoint, which is not known before."""
        self._last_step = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the average after each step of the optimiser."""
        if trainer.global_step == self._last_step:  # gradients are still being accumulated
            return
        self._last_step = trainer.global_step
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        torch._foreach_lerp_(self.average, self._weights(pl_module), 1 - decay)
        self.n_updates += 1

    @torch.no_grad()
    def swap(self, plan: pl.LightningModule) -> None:
        """Exchange the module's weights and the average."""
        for weight, average in zip(self._weights(plan), self.average, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        self._swapped = not self._swapped

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate the average."""
        if self.average:
            self.swap(pl_module)

    on_validation_end = on_validation_start

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the average in the module."""
        self.finish(pl_module)

    def finish(self, plan: pl.LightningModule) -> None:
        """Leave the average in the module, once; in the midst of validation it is there already."""
        if self.average:
            if not self._swapped:
                self.swap(plan)
            self.average, self._swapped = [], False

    def state_dict(self) -> dict[str, Any]:
        """The average and its age, for a checkpoint."""
        return {"average": self.average, "n_updates": self.n_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up an average from a checkpoint."""
        self.average, self.n_updates = state_dict["average"], state_dict["n_updates"]
