"""Settings of the data and of the run: where cells are, how they are read, where results go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from alphastomics import _keys
from alphastomics.config._setting import check, setting

Frame = Literal["slice", "shared"]
Transform = Literal["auto", "log1p", "none"]


@dataclass(frozen=True, kw_only=True)
class KeysConfig:
    """Keys of an AnnData object.

    Parameters
    ----------
    layer
        Key of ``layers`` with the expression. By default ``X``.
    position_key
        Key of ``obsm`` with the positions, 2D or 3D, in any unit.
    cell_type_key
        Column of ``obs`` with cell types: an input of models with ``use_cell_types``, otherwise for scores only.
    """

    layer: str | None = None
    position_key: str = _keys.SPATIAL
    cell_type_key: str | None = None


@dataclass(frozen=True, kw_only=True)
class FrameConfig:
    """Frame of the positions.

    Parameters
    ----------
    frame
        ``slice``: every slice has its own coordinate frame. ``shared``: all slices are registered to one frame.
    """

    frame: Frame = "slice"


@dataclass(frozen=True, kw_only=True)
class SetupConfig(FrameConfig, KeysConfig):
    """Keys of an AnnData object; arguments of :meth:`~alphastomics.model.AlphaSTomics.setup_anndata`.

    Parameters
    ----------
    slice_key
        Column of ``obs`` with the slice of each cell. By default ``slice_id`` if this column exists; otherwise all cells form
        one slice.
    sequence_key
        Column of ``obs`` with the index of each cell in an order, such as that of residues in a chain.
    transform
        Transform of the expression. ``log1p``: logarithm of normalized counts. ``none``: no transform. ``auto``: ``log1p`` for
        counts and ``none`` for other values.
    """

    SECTION: ClassVar[str] = "data.preprocessing"

    slice_key: str | None = None
    sequence_key: str | None = None
    transform: Transform = "auto"

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Source of the training cells.

    Parameters
    ----------
    data_dir
        Folder of a dataset written by ``alphastomics preprocess``.
    input_data
        ``.h5ad`` or ``.parquet`` file with the training cells, instead of a dataset.
    num_genes
        Expected number of genes; another number in the data is an error.
    streaming
        Read cells from the dataset during training instead of loading all of them first.
    buffer_size
        Number of cells among which contexts are shuffled when a dataset is streamed.
    """

    SECTION: ClassVar[str] = "data.loading"

    data_dir: Path | None = setting(None, key="data.processed_data_dir")
    input_data: Path | None = setting(None, key="data.input_data")
    num_genes: int | None = setting(None, ge=1, key="model.num_genes")
    streaming: bool = False
    buffer_size: int = setting(2**20, ge=1, requires=("streaming", True))


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Name, folder and seed of a run.

    Parameters
    ----------
    seed
        Seed of the initial weights and of all random numbers of training.
    exp_name
        Name of the run and of its folder in ``output_dir``.
    output_dir
        Folder of all runs.
    test_after_train
        Score the trained model on held-out cells, if there are any.
    """

    SECTION: ClassVar[str] = "run"

    seed: int = setting(0, ge=0, key="seed.global_seed")
    exp_name: str = "alphastomics"
    output_dir: Path = Path("outputs")
    test_after_train: bool = False
