"""The state of a training on disk, from which an interrupted one is resumed."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Checkpoint

from alphastomics._disk import naming

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    import lightning.pytorch as pl

EVERY = 200  # steps of the optimiser between two checkpoints
KEY = "alphastomics"  # in a checkpoint: what it is of


class LastCheckpoint(Checkpoint):
    """Keeps the newest state of a training in one file, which is whole at every moment.

    Lightning calls it after all other callbacks, so that it holds their state after the step. What falls due at the last batch
    of an epoch is written when the epoch is over: a training then resumes with the next epoch.
    Ctrl-C ends the training of a single process after its step, whose state is written.

    Parameters
    ----------
    path
        The file; written under a temporary name and renamed.
    description
        Plain values that say what the training is of, stored under :data:`KEY`.
    """

    def __init__(self, path: str | PathLike[str], description: Mapping[str, Any]) -> None:
        self.path, self.description = Path(path), dict(description)
        self._saved_at, self._interrupted = 0, False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A training that was resumed has been saved at the step where it begins."""
        self._saved_at = trainer.global_step
        # Processes that are interrupted at different steps could not save together.
        if trainer.world_size == 1 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._interrupt)  # until the runner restores it

    def _interrupt(self, number: int, frame: Any) -> None:
        """Let Ctrl-C wait for the end of the step, when the state is whole; a second one does not wait."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._interrupted = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save when it is due."""
        if not trainer.is_last_batch:
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save when it is due."""
        self._save_if_due(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save what came after the last checkpoint."""
        if trainer.global_step > self._saved_at:
            self._save(trainer)

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        if self._interrupted:
            self.on_train_end(trainer, trainer.lightning_module)
            raise KeyboardInterrupt
        if trainer.global_step >= self._saved_at + EVERY:
            self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with naming(self.path):
                trainer.save_checkpoint(temporary, weights_only=False)
                if trainer.is_global_zero:
                    temporary.replace(self.path)
        finally:
            if trainer.is_global_zero:
                with suppress(OSError):  # where a file cannot be, none is left
                    temporary.unlink()
        self._saved_at = trainer.global_step

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say what the checkpoint is of."""
        checkpoint[KEY] = dict(self.description)
