"""What was logged at the end of each epoch, as the DataFrames that scvi-tools users expect, under any logger."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import pandas as pd

from alphastomics._disk import naming
from alphastomics.train.diagnostics import LAYER

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike


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


class MetricsFile(pl.Callback):
    """Writes what was logged so far as CSV, one row for each epoch: every ten seconds, and when training ends in any way.

    Parameters
    ----------
    path
        The file; written under a temporary name and renamed.
    """

    SECONDS = 10.0

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._written: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._written = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write when it is due."""
        if self._written is not None and time.monotonic() - self._written >= self.SECONDS:
            self._write(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write all of it."""
        self._write(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write what there is, unless nothing has begun."""
        if self._written is not None:
            with suppress(OSError):  # what is told is the exception
                self._write(trainer)

    def _write(self, trainer: pl.Trainer) -> None:
        history = next(c for c in trainer.callbacks if isinstance(c, History))  # type: ignore[attr-defined]
        tables = history.tables()
        if not trainer.is_global_zero or not tables:
            return
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with naming(self.path):
                pd.concat(tables.values(), axis=1).sort_index().to_csv(temporary)
                temporary.replace(self.path)
        finally:
            with suppress(OSError):  # where a file cannot be, none is left
                temporary.unlink()
        self._written = time.monotonic()
