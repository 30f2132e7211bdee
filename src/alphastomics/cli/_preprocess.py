"""Options of the commands that make and upload datasets. Importing this module imports no PyTorch."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  cyclopts reads annotations at run time
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import ExistingFile, PositiveInt  # noqa: TC002

from alphastomics.cli._options import DATA

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from alphastomics.data.preprocess._options import Stage1Options, Stage2Options
    from alphastomics.data.preprocess._run import Run

N_NAMES = 5


@Parameter(name="*", group=DATA)
@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """Where the work is done; in this process if nothing is said.

    Parameters
    ----------
    scheduler
        Address of the scheduler of a Dask cluster, as in ``tcp://10.0.0.1:8786``.
    workers
        Number of processes on this machine that share the work.
    """

    scheduler: str | None = None
    workers: PositiveInt | None = None

    def run(self) -> AbstractContextManager[Run]:
        """Context manager whose value applies a function to tasks."""
        if self.scheduler is None and self.workers is None:
            return nullcontext(map)
        if self.scheduler is not None and self.workers is not None:
            raise ValueError(
                "--scheduler and --workers exclude each other: the work is done by a cluster, or by processes of this machine"
            )
        from alphastomics.data.preprocess import dask_cluster

        return dask_cluster(self.scheduler, workers=self.workers)


@Parameter(name="*", group=DATA)
@dataclass(frozen=True, kw_only=True, slots=True)
class SliceOptions:
    """Where the ``.h5ad`` files keep what.

    Parameters
    ----------
    gene_list_file
        Text file with a gene on every line, which decides genes and their order. Without it, every gene of any file.
    layer
        Key of ``layers`` with the expression; ``X`` when not given.
    position_key
        Key of ``obsm`` with the positions.
    position_is_3d
        Whether these have three coordinates.
    z_spacing
        Distance between the sections of a stack, in units of the positions: z is the number of the section, in the order
        of the numbers in their names (2 before 10), times this.
    slice_key
        Column of ``obs`` with the slice of a cell; ``slice_id`` if it is there when not given, else a file is a slice.
    animal_key
        Column of ``obs`` with the animal, for ``--split animal``.
    cell_type_key
        Column of ``obs`` with labels.
    skip_log_normalize
        The values are transformed already, and are taken as they are.
    """

    gene_list_file: ExistingFile | None = None
    layer: str | None = None
    position_key: str = "spatial"
    position_is_3d: Annotated[bool, Parameter(negative=())] = False
    z_spacing: float = 0.0
    slice_key: str | None = None
    animal_key: str | None = None
    cell_type_key: str | None = None
    skip_log_normalize: Annotated[bool, Parameter(negative=())] = False

    def options(self) -> Stage1Options:
        """Options of the stage."""
        from alphastomics.data.preprocess._options import Stage1Options

        return Stage1Options(
            genes=None if self.gene_list_file is None else read_genes(self.gene_list_file),
            layer=self.layer,
            position_key=self.position_key,
            position_is_3d=self.position_is_3d,
            z_spacing=self.z_spacing,
            slice_key=self.slice_key,
            animal_key=self.animal_key,
            cell_type_key=self.cell_type_key,
            log_normalize=not self.skip_log_normalize,
        )


@Parameter(name="*", group=DATA)
@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetOptions:
    """How the dataset is divided.

    Parameters
    ----------
    split
        What stays together in training, validation or test: ``cell`` (nothing), ``slice`` or ``animal``.
    train_ratio
        Share of the training set.
    val_ratio
        Share of the validation set; the rest is the test set.
    max_shard_size
        Largest number of cells in a file.
    frame
        ``slice``: every slice has its own frame; ``shared``: all are registered to one.
    skip_scale
        Leave the genes as they vary.
    normalize_position
        Show the network positions in units of the radius of a slice; ``--no-normalize-position``: in those of the input,
        for positions that have about unit variance already. Files and results have the units of the input either way.
    scale_per_slice
        Bring every gene of every slice to mean 0 and variance 1 among its cells; that is what the dataset then holds.
    """

    split: Literal["cell", "slice", "animal"] = "cell"
    train_ratio: float = 0.8
    val_ratio: float = 0.1
    max_shard_size: PositiveInt = 100_000
    frame: Literal["slice", "shared"] = "slice"
    skip_scale: Annotated[bool, Parameter(negative=())] = False
    normalize_position: bool = True
    scale_per_slice: Annotated[bool, Parameter(negative=())] = False

    def options(self, seed: int) -> Stage2Options:
        """Options of the stage."""
        from alphastomics.data.preprocess._options import Stage2Options

        if self.skip_scale and self.scale_per_slice:
            raise ValueError("--skip-scale and --scale-per-slice contradict each other; give one")
        return Stage2Options(
            split=self.split,
            train_ratio=self.train_ratio,
            val_ratio=self.val_ratio,
            max_shard_size=self.max_shard_size,
            frame=self.frame,
            scale=not self.skip_scale,
            normalize_position=self.normalize_position,
            scale_per_slice=self.scale_per_slice,
            seed=seed,
        )


def read_genes(path: Path) -> tuple[str, ...]:
    """The genes of a text file, one per line; empty lines are ignored."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text file; write a gene on every line") from error
    genes = [line.strip() for line in lines if line.strip()]
    if repeated := sorted({gene for gene, n in Counter(genes).items() if n > 1}):
        listed = ", ".join(map(repr, repeated[:N_NAMES]))
        raise ValueError(f"{path} names {len(repeated)} genes more than once ({listed}); name each once")
    if not genes:
        raise ValueError(f"{path} names no gene; write one on every line")
    return tuple(genes)


@Parameter(name="*", group=DATA)
@dataclass(frozen=True, kw_only=True, slots=True)
class UploadOptions:
    """How a dataset is shown on the Hub.

    Parameters
    ----------
    private
        Only the organization sees it.
    license
        License for the card, as the Hub writes it: ``cc-by-4.0``, ``mit``, …
    overwrite
        Replace another dataset, and a card, that the repository holds.
    """

    private: Annotated[bool, Parameter(negative=())] = False
    license: str | None = None
    overwrite: Annotated[bool, Parameter(negative=())] = False
