"""Options of the commands that make and upload datasets. Importing this module imports no PyTorch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.types import ExistingFile  # noqa: TC002  read at run time

from alphastomics.cli._options import DATA, options
from alphastomics.config import ClusterConfig, Stage1Options, Stage2Options, UploadConfig

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from alphastomics.data.preprocess._run import Run


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
