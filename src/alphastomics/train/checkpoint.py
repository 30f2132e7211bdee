"""Checkpoints, from which an interrupted training is resumed."""

from __future__ import annotations

import signal
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from alphastomics._io._atomic import replacing
from alphastomics._io._errors import describe_error, os_errors_for
from alphastomics.train.callbacks import OptimizerStepCallback
from alphastomics.train.distributed.processes import gather_objects
from alphastomics.train.interrupt import SignalLatch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    import lightning.pytorch as pl

KEY = "alphastomics"  # key of the description in a checkpoint
LAST, SUFFIX = "last.ckpt", ".ckpt"
KEPT = "an earlier checkpoint is intact: free disk space and continue it with resume='last'"


def checkpoint_path(checkpoint: str | PathLike[str]) -> Path:
    """The file of ``checkpoint=``; ``last.ckpt`` if it is a folder."""
    path = Path(checkpoint)
    return path / LAST if path.is_dir() else path


def find_checkpoints(checkpoint: str | PathLike[str]) -> list[Path]:
    """The file of ``checkpoint=`` if it exists, or all checkpoints in that folder, newest first."""
    path = Path(checkpoint)
    if not path.is_dir():
        return [path] if path.exists() else []
    files = [file for file in path.glob(f"*{SUFFIX}") if file.is_file() and not file.name.startswith(".")]
    return sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True)


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint to ``path``; Lightning would write a temporary file elsewhere, which a killed process leaves behind."""
    image = BytesIO()  # torch aborts the process if closing a file fails
    torch.save(state, image)
    path.write_bytes(image.getvalue())  # a view of the buffer crashes Python's collector (gh-111049)


class DeferredErrorIO(TorchCheckpointIO):
    """Writes checkpoints with :func:`write`, and stores an error in ``error`` until all processes can raise it together."""

    error: OSError | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint."""
        self.error = None
        try:
            write(checkpoint, Path(path))
        except OSError as error:
            self.error = error


class LastCheckpoint(OptimizerStepCallback, Checkpoint):
    """Writes the newest state of a training to one file, which is replaced atomically.

    Lightning calls checkpoint callbacks after all others, so the file holds the state of those after the step. A checkpoint
    that is due at the last batch of an epoch is written after the epoch; the training then resumes with the next epoch. A
    training that stops within an epoch is saved after its last step. In a single process, Ctrl-C takes effect after the
    current step, and the state is saved.

    Parameters
    ----------
    path
        The file.
    description
        Plain values that identify the training, stored under :data:`KEY`.
    every
        Steps between two checkpoints.
    """

    def __init__(self, path: str | PathLike[str], description: Mapping[str, Any], every: int) -> None:
        self.path, self.description, self.every = Path(path), dict(description), every
        self._saved_at = 0
        self._latch = SignalLatch()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record Ctrl-C from now on, before other callbacks write files; the runner restores the handler."""
        # Several processes may be interrupted at different steps, and could not save together.
        if trainer.world_size == 1:
            self._latch.arm(signal.SIGINT)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Count steps from that of the checkpoint, and make the folder.

        Raises ``ValueError`` if processes have read different checkpoints.
        """
        super().on_train_start(trainer, pl_module)
        steps = gather_objects(trainer, trainer.global_step)
        if len(set(steps)) > 1:
            found = ", ".join(f"{step} in process {i}" for i, step in enumerate(steps))
            raise ValueError(
                f"The processes have read different checkpoints (step {found}); checkpoint= must name a file on a shared disk"
            )
        self._saved_at = trainer.global_step
        if trainer.is_global_zero:
            with os_errors_for(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)

    def on_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if a checkpoint is due; at the last batch, leave that to the end of the epoch."""
        if not trainer.is_last_batch:
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save if a checkpoint is due."""
        self._save_if_due(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save unless the last checkpoint is of this step."""
        if trainer.global_step > self._saved_at:
            self._save(trainer)

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        ends = self._latch.received or trainer.should_stop or trainer.global_step == trainer.max_steps
        if trainer.global_step >= self._saved_at + (1 if ends else self.every):
            self._save(trainer)
        if self._latch.received:
            raise KeyboardInterrupt

    def _save(self, trainer: pl.Trainer) -> None:
        strategy, message = trainer.strategy, ""
        previous, strategy.checkpoint_io = strategy.checkpoint_io, (writer := DeferredErrorIO())
        try:
            with replacing(self.path, sync=True, is_writer=trainer.is_global_zero) as temporary:
                trainer.save_checkpoint(temporary, weights_only=False)
                if writer.error is not None:
                    raise writer.error
        except OSError as error:
            message = f"{describe_error(error)}; {KEPT}"
        finally:
            strategy.checkpoint_io = previous
        message = strategy.broadcast(message)
        if message:
            raise OSError(message)
        self._saved_at = trainer.global_step

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the description."""
        checkpoint[KEY] = dict(self.description)
