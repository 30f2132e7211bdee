"""A run: where its data come from, and the folder that it fills. Like ``_options.py``, nothing here imports the library."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.types import PositiveInt  # noqa: TC002  read at run time

from alphastomics.cli._options import DATA, RUN

CONFIG, CHECKPOINTS, LOGS = "config.yaml", "checkpoints", "logs"
LAST = Path("last")  # in the place of a .ckpt file


@Parameter(name="*", group=DATA)
@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOptions:
    """The cells to train on.

    Parameters
    ----------
    input_data
        Reference, an ``.h5ad`` or ``.parquet`` file.
    data_dir
        Or a dataset, a folder that ``alphastomics preprocess`` wrote.
    streaming
        Read a dataset from disk as it is needed.
    buffer_size
        With ``--streaming``, among how many cells contexts are shuffled; 1,048,576 when not given.
    num_genes
        Number of genes that the data must have.
    """

    input_data: Path | None = None
    data_dir: Path | None = None
    streaming: bool = False
    buffer_size: PositiveInt | None = None
    num_genes: PositiveInt | None = None

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises
        ------
        FileNotFoundError
            If the data are not there.
        ValueError
            If there are no data, data from two places, or options for data of the other kind.
        """
        if self.input_data is None and self.data_dir is None:
            raise ValueError(
                "--data-dir or --input-data is needed: a dataset, or an .h5ad or .parquet file, to train on"
            )
        if self.input_data is not None and self.data_dir is not None:
            raise ValueError("--data-dir and --input-data both say what to train on; give one")
        if self.input_data is not None and not self.input_data.is_file():
            raise FileNotFoundError(
                f'"{self.input_data}" does not exist, or is no file; correct --input-data, or data.input_data in the file'
            )
        if self.data_dir is not None and not self.data_dir.is_dir():
            raise FileNotFoundError(
                f'"{self.data_dir}" does not exist, or is no folder; correct --data-dir, or data.processed_data_dir in '
                "the file"
            )
        if self.streaming and self.data_dir is None:
            raise ValueError("--streaming is for --data-dir; a file is read as a whole")
        if self.buffer_size is not None and not self.streaming:
            raise ValueError("--buffer-size is for --streaming; without it all cells are held")


@Parameter(name="*", group=RUN)
@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """Where the run goes.

    Parameters
    ----------
    exp_name
        Name of the run, and of its folder in ``--output-dir``.
    output_dir
        Folder of all runs.
    overwrite
        Replace a run of that name.
    resume
        Continue the run of that name where it was, or another one from its ``.ckpt`` file. Alone, without ``--config``, with the
        configuration that the run was started with. ``--resume last``: where there is nothing to continue yet, begin.
    test_after_train
        Score the trained model on cells that it has not seen, if there are any.
    """

    exp_name: str = "alphastomics"
    output_dir: Path = Path("outputs")
    overwrite: Annotated[bool, Parameter(negative=())] = False
    resume: Annotated[tuple[Path, ...] | None, Parameter(alias="--resume-from", consume_multiple=True, negative=())] = (
        None
    )
    test_after_train: bool = False

    def __post_init__(self) -> None:
        if self.resume is not None and len(self.resume) > 1:
            raise ValueError("--resume takes one .ckpt file, or none")
        if self.resume is not None and self.overwrite:
            raise ValueError("--resume continues a run and --overwrite replaces it; give one")
        if self.exp_name in ("", ".", "..") or Path(self.exp_name).name != self.exp_name:
            raise ValueError(f"--exp-name {self.exp_name!r} is no name of a folder")

    @property
    def from_last(self) -> bool:
        """Whether to go on if there is something to go on from, and to begin otherwise."""
        return self.resume == (LAST,)

    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.output_dir / self.exp_name)

    def checkpoint(self, *, claim: bool = True) -> Path | None:
        """Where to continue, if anywhere; refuses a folder that holds another run, if this one is to `claim` it.

        Raises
        ------
        FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError
            If the folder cannot be used, or there is nothing to continue.
        """
        folder = self.folder()
        if folder.path.exists() and not folder.path.is_dir():
            raise NotADirectoryError(f"{folder.path} is a file; name another folder by --exp-name or --output-dir")
        path = None if self.resume is None else self.resume[0] if self.resume and not self.from_last else folder.last
        if self.from_last and not folder.last.exists():
            path = None
        if path is not None and path.is_dir():
            raise IsADirectoryError(
                f"{path} is a folder; give --resume the .ckpt file in it, or --exp-name and --output-dir"
            )
        if path is not None and not path.is_file():
            remedy = "name its file" if self.resume else "see to --exp-name and --output-dir"
            raise FileNotFoundError(f"{path} is missing; there is no training to resume; {remedy}")
        own = path is not None and path.resolve().is_relative_to(folder.path.resolve())
        taken = claim and folder.path.is_dir() and any(folder.path.iterdir())
        if taken and not (self.overwrite or own or (self.from_last and folder.is_begun)):
            raise FileExistsError(
                f"{folder.path} is not empty; give another --exp-name, --resume to continue the run there, "
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
    def is_begun(self) -> bool:
        """Whether it holds nothing but what a run leaves that was killed before its first checkpoint."""
        known = {CONFIG, CHECKPOINTS, LOGS}
        return self.path.is_dir() and not self.model.exists() and {path.name for path in self.path.iterdir()} <= known

    @property
    def config(self) -> Path:
        """Everything that was decided."""
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
        """What was logged."""
        return self.path / LOGS / "metrics.csv"

    @property
    def scores(self) -> Path:
        """Scores of ``--test-after-train``."""
        return self.path / LOGS / "scores.json"

    def make(self, *, resumed: bool) -> None:
        """Make the folder; without what an earlier run left there, unless that is resumed."""
        for name in (CHECKPOINTS, LOGS):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        if not resumed:
            for path in (self.last, self.metrics, self.scores):
                path.unlink(missing_ok=True)
            shutil.rmtree(self.model, ignore_errors=True)

    def discard(self) -> None:
        """Remove what a run that failed before its first checkpoint has left, so that its name is free."""
        for path in (self.config, self.metrics):
            with suppress(OSError):
                path.unlink()
        for path in (self.path / LOGS, self.path / CHECKPOINTS, self.path):
            with suppress(OSError):  # it holds something else
                path.rmdir()


def find_model(path: Path) -> Path:
    """The model that a path leads to: of the folder of a run its model, or its checkpoint before there is one."""
    run = RunFolder(path)
    return next((found for found in (run.model, run.last) if found.exists()), path)
