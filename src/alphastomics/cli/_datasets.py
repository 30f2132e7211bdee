"""The commands that make and upload datasets, and their options. Importing this module imports no PyTorch."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path  # noqa: TC003  read at run time
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory, ExistingFile  # noqa: TC002  read at run time

from alphastomics.cli._options import DATA, SEVERAL, options
from alphastomics.cli._output import check_readable
from alphastomics.config import ClusterConfig, Stage1Options, Stage2Options, UploadConfig

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from alphastomics.data.preprocess._run import Run

logger = logging.getLogger(__name__)


@options
class SliceOptions(Stage1Options):
    """Genes and keys of the input.

    Parameters
    ----------
    gene_list_file
        Text file with the genes of the dataset, one per line, in order. By default all genes of all files.
    """

    gene_list_file: Annotated[ExistingFile | None, Parameter(group=DATA)] = None

    def stage1(self) -> Stage1Options:
        """Options of the stage, with the genes of the file."""
        values = dict(vars(self))
        path = values.pop("gene_list_file")
        return Stage1Options(**values if path is None else values | {"genes": read_genes(path)})


def read_genes(path: Path) -> tuple[str, ...]:
    """The genes of a text file, one per line; empty lines are ignored."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file; --gene-list-file takes one gene per line") from error
    return tuple(line.strip() for line in lines if line.strip())


@options
class DatasetOptions(Stage2Options):
    """How a dataset is split and scaled."""

    def stage2(self) -> Stage2Options:
        """Options of the stage."""
        return Stage2Options(**vars(self))


@options
class ClusterOptions(ClusterConfig):
    """Where both stages run."""

    def run(self) -> AbstractContextManager[Run]:
        """Context manager whose value applies a function to tasks."""
        if self.scheduler is None and self.workers is None:
            return nullcontext(map)
        from alphastomics.data.preprocess import dask_cluster

        return dask_cluster(**vars(self))


@options
class UploadOptions(UploadConfig):
    """How a dataset appears on the Hugging Face Hub."""


def preprocess(
    *,
    input_dir: ExistingDirectory,
    output_dir: Path,
    slices: SliceOptions = SliceOptions(),
    dataset: DatasetOptions = DatasetOptions(),
    cluster: ClusterOptions = ClusterOptions(),
) -> None:
    """Convert a folder of .h5ad files to a dataset: stage1, then stage2.

    Run the same command again to resume after an interruption.

    Parameters
    ----------
    input_dir
        Folder with ``.h5ad`` files.
    output_dir
        Folder for ``data`` and ``metadata.json``. The slices in ``_intermediate_slices`` may be deleted afterwards.
    """
    from alphastomics.data.preprocess import preprocess as both

    check_readable(input_dir)
    first, second = slices.stage1(), dataset.stage2()
    with cluster.run() as run:
        schema = both(input_dir, output_dir, first, second, run=run)
    logger.info("%s is in %s.", schema, output_dir)


def stage1(
    *,
    input_dir: ExistingDirectory,
    output_dir: Path,
    slices: SliceOptions = SliceOptions(),
    cluster: ClusterOptions = ClusterOptions(),
) -> None:
    """Write each slice of a folder of .h5ad files to a separate file.

    Parameters
    ----------
    input_dir
        Folder with ``.h5ad`` files.
    output_dir
        Folder for the slices.
    """
    from alphastomics.data.preprocess import stage1 as first

    check_readable(input_dir)
    options = slices.stage1()
    with cluster.run() as run:
        n_slices = first(input_dir, output_dir, options, run=run)
    logger.info("%d slices are in %s.", n_slices, output_dir)


def stage2(
    *,
    input_dirs: Annotated[list[ExistingDirectory], SEVERAL],
    output_dir: Path,
    dataset: DatasetOptions = DatasetOptions(),
    cluster: ClusterOptions = ClusterOptions(),
) -> None:
    """Merge the slices written by stage1 into one dataset.

    Parameters
    ----------
    input_dirs
        Folders of slices.
    output_dir
        Folder for ``data`` and ``metadata.json``.
    """
    from alphastomics.data.preprocess import stage2 as second

    for folder in input_dirs:
        check_readable(folder)
    options = dataset.stage2()
    with cluster.run() as run:
        schema = second(input_dirs, output_dir, options, run=run)
    logger.info("%s is in %s.", schema, output_dir)


def upload(*, data_dir: ExistingDirectory, repo_id: str, options: UploadOptions = UploadOptions()) -> None:
    """Upload a dataset to the Hugging Face Hub, or resume an interrupted upload.

    The token is taken from ``hf auth login`` or from the environment variable ``HF_TOKEN``.

    Parameters
    ----------
    data_dir
        Folder of a dataset, written by ``preprocess``.
    repo_id
        ``organization/name``.
    """
    from alphastomics.data.hub import upload as run

    done = run(data_dir, repo_id, **vars(options))
    logger.info("%d files were sent; the dataset is at %s.", len(done.files), done.url)
