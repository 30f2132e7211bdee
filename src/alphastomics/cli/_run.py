"""A run: the cells that it is trained on, and its folder. Importing this module imports no PyTorch."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from alphastomics.cli._options import RUN, options
from alphastomics.config import RunConfig, SourceConfig

CONFIG, CHECKPOINTS, LOGS = "config.yaml", "checkpoints", "logs"
LAST = Path("last")  # value of --resume instead of a .ckpt file


@options
class SourceOptions(SourceConfig):
    """The cells to train on."""

    def check(self) -> None:
        """Check that there is either a file or a dataset, and that only a dataset is streamed."""
        if self.input_data is None and self.data_dir is None:
            raise ValueError("--data-dir or --input-data is required: a dataset, or an .h5ad or .parquet file")
        if self.input_data is not None and self.data_dir is not None:
            raise ValueError("--data-dir and --input-data exclude each other; pass one of them")
        if self.input_data is not None and not self.input_data.is_file():
            raise FileNotFoundError(
                f'"{self.input_data}" does not exist or is not a file; correct --input-data, or data.input_data in the configuration file'
            )
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise FileNotFoundError(
                f'"{self.data_dir}" does not exist or is not a folder; correct --data-dir, or data.processed_data_dir in '
                "the configuration file"
            )
        if self.streaming and self.data_dir is None:
            raise ValueError("--streaming requires --data-dir; a file is loaded whole")


@options
class RunOptions(RunConfig):
    """The run and its folder.

    Parameters
    ----------
    overwrite
        Replace a run of the same name.
    resume
        Continue the run of that name, or start from a ``.ckpt`` file of another run. Without ``--config``, the configuration of
        that run is used. ``--resume last`` continues if there is a checkpoint and starts a new run otherwise.
    """

    overwrite: Annotated[bool, Parameter(group=RUN, negative=())] = False
    resume: Annotated[
        tuple[Path, ...] | None,
        Parameter(group=RUN, alias="--resume-from", consume_multiple=True, negative=()),
    ] = None

    def __post_init__(self) -> None:
        if self.resume is not None and len(self.resume) > 1:
            raise ValueError("--resume takes at most one .ckpt file")
        if self.resume is not None and self.overwrite:
            raise ValueError("--resume and --overwrite exclude each other; pass one of them")
        if self.exp_name in ("", ".", "..") or Path(self.exp_name).name != self.exp_name:
            raise ValueError(f"--exp-name {self.exp_name!r} is not a valid folder name")

    @property
    def from_last(self) -> bool:
        """Whether to continue if there is a checkpoint, and to start otherwise."""
        return self.resume == (LAST,)

    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.output_dir / self.exp_name)

    def checkpoint(self, *, check_free: bool = True) -> Path | None:
        """The checkpoint to continue from, if any; with `check_free`, also check that this run may use the folder.

        Raises
        ------
        FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError
            If the folder cannot be used, or there is nothing to continue.
        """
        folder = self.folder()
        if folder.path.exists() and not folder.path.is_dir():
            raise NotADirectoryError(f"{folder.path} is a file; pass another --exp-name or --output-dir")
        path = None if self.resume is None else self.resume[0] if self.resume and not self.from_last else folder.last
        if self.from_last and not folder.last.exists():
            path = None
        if path is not None and path.is_dir():
            raise IsADirectoryError(
                f"{path} is a folder; pass the .ckpt file in it to --resume, or pass --exp-name and --output-dir"
            )
        if path is not None and not path.is_file():
            remedy = "correct the file name" if self.resume else "check --exp-name and --output-dir"
            raise FileNotFoundError(f"{path} is missing, so there is no training to resume; {remedy}")
        own = path is not None and path.resolve().is_relative_to(folder.path.resolve())
        taken = check_free and folder.path.is_dir() and any(folder.path.iterdir())
        if taken and not (self.overwrite or own or (self.from_last and folder.is_unfinished)):
            raise FileExistsError(
                f"{folder.path} is not empty; pass another --exp-name, --resume to continue the run in it, "
                "or --overwrite to replace it"
            )
        return path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of a run.

    Parameters
    ----------
    path
        ``OUTPUT_DIR/EXP_NAME``.
    """

    path: Path

    @property
    def is_unfinished(self) -> bool:
        """Whether it contains only files of a run that has no model yet."""
        known = {CONFIG, CHECKPOINTS, LOGS}
        return self.path.is_dir() and not self.model.exists() and {path.name for path in self.path.iterdir()} <= known

    @property
    def config(self) -> Path:
        """The configuration."""
        return self.path / CONFIG

    @property
    def last(self) -> Path:
        """The state of the training."""
        return self.path / CHECKPOINTS / "last.ckpt"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / CHECKPOINTS / "model"

    @property
    def metrics(self) -> Path:
        """The logged metrics."""
        return self.path / LOGS / "metrics.csv"

    @property
    def scores(self) -> Path:
        """Scores of ``--test-after-train``."""
        return self.path / LOGS / "scores.json"

    def make(self, *, resumed: bool) -> None:
        """Make the folder, and remove the files of an earlier run unless it is resumed."""
        for name in (CHECKPOINTS, LOGS):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        if not resumed:
            for path in (self.last, self.metrics, self.scores):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.model, ignore_errors=True)

    def discard(self) -> None:
        """Remove the files of a run that failed before its first checkpoint."""
        for path in (self.config, self.metrics):
            with suppress(OSError):
                path.unlink()
        for path in (self.path / LOGS, self.path / CHECKPOINTS, self.path):
            with suppress(OSError):  # it has other contents
                path.rmdir()


def find_model(path: Path) -> Path:
    """The model at a path: for the folder of a run its model, or its checkpoint while there is none."""
    run = RunFolder(path)
    return next((found for found in (run.model, run.last) if found.exists()), path)
