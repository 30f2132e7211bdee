"""Settings of datasets: how they are made of ``.h5ad`` files, on which machines, and how they are uploaded."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

from alphastomics._io._errors import format_names
from alphastomics.config._data import FrameConfig, KeysConfig, RunConfig
from alphastomics.config._setting import check, setting

SplitUnit = Literal["cell", "slice", "animal"]


@dataclass(frozen=True, kw_only=True)
class Stage1Options(KeysConfig):
    """Options of stage 1: genes and keys of the input.

    Parameters
    ----------
    genes
        Names of the genes, in order. By default all genes of all files, in the order of first occurrence. Genes that a file
        does not contain are unmeasured in its slices.
    position_is_3d
        Whether positions have three coordinates.
    z_spacing
        Distance between consecutive sections with 2D positions, in units of the positions. The z coordinate of a section is
        its number times this distance; sections are sorted by the numbers in their names (2 before 10).
    slice_key
        Column of ``obs`` with the slice of each cell. By default ``slice_id`` if this column exists; otherwise each file
        is one slice.
    animal_key
        Column of ``obs`` with the animal of each cell, which a split by animal requires.
    log_normalize
        Scale counts to a common library size and log-transform them when the dataset is read. Disable this for values that
        are already transformed.
    """

    genes: tuple[str, ...] | None = setting(None, python_only=True)
    position_is_3d: bool = setting(False, off=())
    z_spacing: float = setting(0.0, ge=0)
    slice_key: str | None = None
    animal_key: str | None = None
    log_normalize: bool = setting(True, off=("--skip-log-normalize",))

    def __post_init__(self) -> None:
        check(self)
        if self.genes is not None and not self.genes:
            raise ValueError("the list of genes is empty; list at least one gene")
        if repeated := [gene for gene, n in Counter(self.genes).items() if n > 1]:
            raise ValueError(
                f"the list of genes contains duplicates: {format_names(sorted(repeated))}; list each gene once"
            )
        if self.z_spacing and self.position_is_3d:
            raise ValueError(
                "z_spacing=… and position_is_3d=… exclude each other; z is the third coordinate or that of the section"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = asdict(self)
        return values | {"genes": None if self.genes is None else list(self.genes)}


@dataclass(frozen=True, kw_only=True)
class Stage2Options(FrameConfig):
    """Options of stage 2: how a dataset is split and scaled.

    Parameters
    ----------
    split
        Unit that is assigned to the training, validation or test set: ``cell``, ``slice`` or ``animal``.
    train_ratio
        Fraction of these units in the training set.
    val_ratio
        Fraction of these units in the validation set; the rest is the test set.
    max_shard_size
        Largest number of cells in a file.
    scale
        Standardize each gene to mean 0 and variance 1 when the dataset is read.
    normalize_position
        Center and scale the positions for the network, with values fitted to the training set. Otherwise the center is 0 and
        the scale 1, for positions that already have about unit variance. Files and results have the units of the input in
        either case.
    scale_per_slice
        Standardize each gene within each slice instead, after the log transform. The dataset then contains standardized values,
        and a model reads and samples these.
    seed
        Seed of the split.
    """

    split: SplitUnit = "cell"
    train_ratio: float = setting(0.8, gt=0, le=1)
    val_ratio: float = setting(0.1, ge=0, lt=1)
    max_shard_size: int = setting(100_000, ge=1)
    scale: bool = setting(True, off=("--skip-scale",))
    normalize_position: bool = True
    scale_per_slice: bool = setting(False, off=(), requires=("scale", True))
    seed: int = RunConfig.seed

    def __post_init__(self) -> None:
        check(self)
        if self.train_ratio + self.val_ratio > 1 + 1e-9:
            raise ValueError(
                f"train_ratio={self.train_ratio} and val_ratio={self.val_ratio} must sum to at most 1; the rest is the test set"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Processes of both stages: a Dask cluster, processes of this machine, or by default this process.

    Parameters
    ----------
    scheduler
        Address of the scheduler of a Dask cluster, such as ``tcp://10.0.0.1:8786``. Its workers need the files under the same
        paths.
    workers
        Number of processes to start on this machine.
    """

    scheduler: str | None = None
    workers: int | None = setting(None, ge=1)

    def __post_init__(self) -> None:
        check(self)
        if self.scheduler is not None and self.workers is not None:
            raise ValueError("scheduler=… and workers=… exclude each other; pass one of them")


@dataclass(frozen=True, kw_only=True)
class UploadConfig:
    """Upload of a dataset to the Hugging Face Hub.

    Parameters
    ----------
    private
        Create a private repository. Otherwise the default of the organization applies.
    license
        License in the dataset card, as an identifier of the Hub: ``cc-by-4.0``, ``mit``, …
    overwrite
        Replace another dataset and an edited dataset card in the repository.
    """

    private: bool = setting(False, off=())
    license: str | None = None
    overwrite: bool = setting(False, off=())
