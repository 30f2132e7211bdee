"""The state of a training on disk, from which an interrupted one is resumed."""

from __future__ import annotations

import signal
import threading
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import TorchCheckpointIO

from alphastomics._io._atomic import replacing
from alphastomics._io._errors import describe_error
from alphastomics.train.distributed.processes import gather_objects

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    import lightning.pytorch as pl

EVERY = 200  # steps of the optimizer between two checkpoints
KEY = "alphastomics"  # in a checkpoint: what it is of
LAST, SUFFIX = "last.ckpt", ".ckpt"
KEPT = "the checkpoint before it is whole, if there was one: make room and go on from it with resume='last'"


def checkpoint_path(checkpoint: str | PathLike[str]) -> Path:
    """The file of ``checkpoint=``, which may also name the folder that it is in."""
    path = Path(checkpoint)
    return path / LAST if path.is_dir() else path


def find_checkpoints(checkpoint: str | PathLike[str]) -> list[Path]:
    """Checkpoints that ``checkpoint=`` names, the newest first: the file, or all of the folder."""
    path = Path(checkpoint)
    if not path.is_dir():
        return [path] if path.exists() else []
    files = [file for file in path.glob(f"*{SUFFIX}") if file.is_file() and not file.name.startswith(".")]
    return sorted(files, key=lambda file: (file.stat().st_mtime_ns, file.name), reverse=True)


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint at once where it belongs; Lightning writes it elsewhere first, and leaves it there when it is killed."""
    image = BytesIO()  # torch ends the process where it cannot close a file
    torch.save(state, image)
    path.write_bytes(image.getvalue())  # a view of the buffer crashes Python's collector (gh-111049)


class DeferredErrorIO(TorchCheckpointIO):
    """Writes checkpoints by :func:`write`, and keeps an error until all processes can raise it together.

    Attributes
    ----------
    error
        Why the last checkpoint could not be written.
    """

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


class LastCheckpoint(Checkpoint):
    """Keeps the newest state of a training in one file, which is whole at every moment.

    Lightning calls it after all other callbacks, so that it holds their state after the step. What falls due at the last batch
    of an epoch is written when the epoch is over: a training then resumes with the next epoch. A training that stops in the
    midst of an epoch leaves the state after its last step.
    Ctrl-C ends the training of a single process after its step, whose state is written.

    Parameters
    ----------
    path
        The file; written under a temporary name and renamed.
    description
        Plain values that say what the training is of, stored under :data:`KEY`.
    every
        Steps between two checkpoints; None for :data:`EVERY`.

    Raises
    ------
    ValueError
        If ``every`` counts no steps.
    """

    def __init__(self, path: str | PathLike[str], description: Mapping[str, Any], every: int | None = None) -> None:
        self.path, self.description, self.every = Path(path), dict(description), EVERY if every is None else every
        if self.every < 1:
            raise ValueError(f"checkpoint_every={every} counts steps: at least 1")
        self._saved_at = self._step = 0
        self._interrupted = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A training that was resumed has been saved at the step where it begins.

        Raises
        ------
        ValueError
            If processes found different checkpoints.
        """
        steps = gather_objects(trainer, trainer.global_step)
        if len(set(steps)) > 1:
            found = ", ".join(f"{step} in process {i}" for i, step in enumerate(steps))
            raise ValueError(
                f"The processes would go on from different steps ({found}): checkpoint= must name a file that all of them see"
            )
        self._saved_at = self._step = trainer.global_step
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
        if trainer.global_step == self._step:  # gradients are still being accumulated
            return
        self._step = trainer.global_step
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
        ends = self._interrupted or trainer.should_stop or trainer.global_step == trainer.max_steps
        if trainer.global_step >= self._saved_at + (1 if ends else self.every):
            self._save(trainer)
        if self._interrupted:
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
        """Say what the checkpoint is of."""
        checkpoint[KEY] = dict(self.description)
