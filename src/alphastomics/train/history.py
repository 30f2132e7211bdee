"""What was logged at the end of each epoch, as the DataFrames that scvi-tools users expect, under any logger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pandas as pd

from alphastomics.train.diagnostics import LAYER

if TYPE_CHECKING:
    from collections.abc import Mapping


class History(pl.Callback):
    """Collects the epoch values of training and validation.

    Parameters
    ----------
    before
        History of earlier training, which this one continues.
    """

    def __init__(self, before: Mapping[str, pd.DataFrame] | None = None) -> None:
        self.before = dict(before or {})
        self.offset = max((int(table.index[-1]) + 1 for table in self.before.values() if len(table)), default=0)
        self.values: dict[str, dict[int, float]] = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take what this epoch logged."""
        # Layers are not looked at in every epoch, and Lightning goes on showing what was seen last.
        stale = getattr(pl_module, "last_look", None) != trainer.current_epoch
        for name, value in trainer.callback_metrics.items():
            if name.startswith(("train_", "validation_")) and not (stale and name.startswith(LAYER)):
                self.values.setdefault(name, {})[self.offset + trainer.current_epoch] = float(value)

    def tables(self) -> dict[str, pd.DataFrame]:
        """One table per logged name: index ``epoch``, one column of that name."""
        tables: dict[str, pd.DataFrame] = dict(self.before)
        for name, values in self.values.items():
            new = pd.DataFrame({name: pd.Series(values, dtype=float)}).rename_axis("epoch")
            tables[name] = pd.concat([self.before[name], new]) if name in self.before else new
        return tables

    def state_dict(self) -> dict[str, Any]:
        """Values so far, for a checkpoint."""
        return {"values": self.values, "offset": self.offset}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the values of a checkpoint."""
        self.values, self.offset = state_dict["values"], state_dict["offset"]
