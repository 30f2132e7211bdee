"""The model of a command and the cells that it is applied to: options, checks and reading.

Importing this module imports no PyTorch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory, ExistingFile  # noqa: TC002  read at run time

from alphastomics import _keys
from alphastomics.cli._options import options
from alphastomics.config import EmbeddingConfig, SamplingConfig, TrainerConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from alphastomics.data import TissueSchema
    from alphastomics.model import AlphaSTomics

logger = logging.getLogger(__name__)

HUB = "hf://"  # prefix of repository names, which could be folder names otherwise
H5AD, PARQUET, TENSORS, ARRAYS = ".h5ad", ".parquet", ".pt", ".npz"
INPUTS, TISSUES, EMBEDDINGS = (H5AD, PARQUET, TENSORS), (H5AD, PARQUET), (ARRAYS, PARQUET, H5AD)
SAMPLED = Path("sampled.h5ad")


def check_checkpoint(kind: Any, value: str | None) -> None:
    """Check that a model is a local path or a name on the Hub, before anything is imported."""
    if value is not None and not value.startswith(HUB) and not Path(value).exists():
        raise ValueError(f'"{value}" does not exist; models on the Hugging Face Hub are named {HUB}organization/name.')


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QueryOptions:
    """A model, and the cells that it is applied to.

    Parameters
    ----------
    checkpoint
        Folder of a model or of a run of ``alphastomics train``, ``.ckpt`` file of a finished training, or
        ``hf://organization/name`` on the Hugging Face Hub, optionally with ``@revision``.
    input_data
        Cells: an ``.h5ad`` file, a ``.parquet`` file or a ``.pt`` file of tensors.
    data_dir
        Folder of a dataset with the cells, instead of a file.
    split
        Split of the dataset. By default ``test``.
    accelerator
        Kind of device: ``auto``, ``cpu``, ``gpu``, ``mps``, …
    """

    checkpoint: Annotated[str, Parameter(validator=check_checkpoint)]
    input_data: ExistingFile | None = None
    data_dir: ExistingDirectory | None = None
    split: Literal["train", "validation", "test"] | None = None
    accelerator: str = TrainerConfig.accelerator

    def __post_init__(self) -> None:
        if self.input_data is not None and self.data_dir is not None:
            raise ValueError("--input-data and --data-dir exclude each other; pass one of them")
        if self.split is not None and self.data_dir is None:
            raise ValueError("--split requires --data-dir; add that, or remove --split")

    @property
    def has_cells(self) -> bool:
        """Whether the options name cells."""
        return self.input_data is not None or self.data_dir is not None

    @property
    def origin(self) -> Path | None:
        """The file or folder with the cells."""
        return self.input_data or self.data_dir

    def load(self, modes: Sequence[str] = (), flag: str = "") -> AlphaSTomics:
        """Load the model and check that its mode is one of those that a flag requires; imports PyTorch."""
        from alphastomics.cli._run import find_model
        from alphastomics.model import AlphaSTomics

        if self.checkpoint.startswith(HUB):
            from alphastomics.model._hub import download

            name, _, revision = self.checkpoint.removeprefix(HUB).partition("@")
            folder = download(name, revision=revision or None)
        else:
            folder = find_model(Path(self.checkpoint))
        model = AlphaSTomics.load(folder, adata=False, accelerator=self.accelerator)
        if modes:
            check_mode(model, modes, flag)
        return model

    def read(self, modes: Sequence[str] = (), flag: str = "", **reads: bool) -> tuple[AlphaSTomics, AnnData]:
        """Load the model as :meth:`load` does, and read the cells, with ``positions`` and ``expression`` if these are True."""
        if self.data_dir is not None:
            model = self.load(modes, flag)
            return model, read_split(self.data_dir, self.split or "test", model.schema, **reads)
        if self.input_data is None:
            raise ValueError("--input-data or --data-dir is required; pass the cells that the model is applied to")
        check_suffix(self.input_data, INPUTS)
        model = self.load(modes, flag)
        return model, read_file(self.input_data, model.schema, **reads)


@options
class SampleOptions(SamplingConfig):
    """Modality, number of samples and reverse process."""


@options
class EmbeddingOptions(EmbeddingConfig):
    """Layer and positions."""

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``AlphaSTomics.get_latent_representation``."""
        return {"layer": self.layer, "use_positions": self.use_positions}


def check_suffix(path: Path, suffixes: Sequence[str]) -> None:
    """Check that the name of a file ends in one of some suffixes."""
    if path.suffix not in suffixes:
        listed = " or ".join([", ".join(suffixes[:-1]), suffixes[-1]] if suffixes[1:] else suffixes)
        raise ValueError(f"{path} must end in {listed}, which determines the format")


def check_sample(query: QueryOptions, output: Path, sample_mode: str, n_cells: int | None) -> None:
    """Check that the options of ``sample`` are consistent, and that the default output does not replace a file.

    Raises
    ------
    FileExistsError
        If ``output`` is the default and exists.
    ValueError
        If the number of cells is missing or given twice.
    """
    if n_cells is not None and query.has_cells:
        raise ValueError("--n-cells and the input both set the number of cells; pass one of them")
    if sample_mode == "joint" and n_cells is None and not query.has_cells:
        raise ValueError(
            "--sample-mode joint requires the number of cells of the new slices; pass --n-cells, or pass slices of the same "
            "size to --input-data or --data-dir"
        )
    if output == SAMPLED and output.is_file():
        raise FileExistsError(f"{output} exists; pass another file to --output")


def check_mode(model: AlphaSTomics, modes: Sequence[str], flag: str) -> None:
    """Check that a model was trained for what a flag requires."""
    if model.mode not in ("any", *modes):
        raise ValueError(
            f"{flag} requires a model trained with --mode {modes[0]} or --mode any; this one was trained with --mode "
            f"{model.mode}"
        )


def fit_query(cells: AnnData, path: Path, schema: TissueSchema, *, positions: bool, expression: bool = True) -> AnnData:
    """Check that a model can read ``cells``, and complete them in place; ``path`` is named in messages.

    ``positions`` and ``expression`` are whether the model reads them; positions include slices.
    """
    if expression:
        _check_genes(cells, path, schema)
    if positions:
        _name_slice(cells, path, schema)
        _check_positions(cells, path, schema)
    return cells


def _check_genes(cells: AnnData, path: Path, schema: TissueSchema) -> None:
    from alphastomics.data._checks import check_genes

    if schema.layer is not None and schema.layer not in cells.layers:
        found = ", ".join(map(repr, cells.layers.keys())) or "none"
        raise KeyError(
            f'{path}: layers["{schema.layer}"] is missing (found: {found}); the model was trained on this layer, so store the '
            "same kind of values there"
        )
    try:
        names = check_genes(cells.var_names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    n_missing = len(set(schema.genes).difference(names))
    if 2 * n_missing > schema.n_genes:
        raise ValueError(
            f"{path}: {n_missing} of the {schema.n_genes} genes of this model are missing, more than half (the model has "
            f"{', '.join(map(repr, schema.genes[:3]))}, …; the file {', '.join(map(repr, names[:3]))}, …); use the same gene "
            "names, or train a model on the shared genes"
        )


def _check_positions(cells: AnnData, path: Path, schema: TissueSchema) -> None:
    import numpy as np

    from alphastomics.data._plane import insert_column

    key, n_dims = schema.position_key, schema.n_columns
    if key not in cells.obsm:
        found = ", ".join(map(repr, cells.obsm.keys())) or "none"
        raise KeyError(f'{path}: obsm["{key}"] is missing (found: {found}); store the positions there')
    position = np.asarray(cells.obsm[key])
    if position.ndim == 2 and position.shape[1] == 3 and n_dims == 2:
        cells.obsm[key] = position[:, :2]  # as for a dataset
    elif position.ndim == 2 and position.shape[1] == schema.n_dims < n_dims:
        cells.obsm[key] = insert_column(position, schema)
    elif position.ndim == 2 and position.shape[1] < n_dims:
        raise ValueError(
            f'{path}: obsm["{key}"] has {position.shape[1]} coordinates, and this model was trained in {n_dims} dimensions; '
            "use a model or cells of the same dimension"
        )


def _name_slice(cells: AnnData, path: Path, schema: TissueSchema) -> None:
    """Treat a file without slices as one slice, as ``preprocess`` does."""
    import pandas as pd

    key = schema.slice_key
    if key is None or key in cells.obs:
        return
    cells.obs[key] = pd.Categorical([path.stem] * cells.n_obs)
    logger.info('%s has no obs["%s"]; its cells are treated as one slice, %r.', path, key, path.stem)


def read_file(path: Path, schema: TissueSchema, **reads: bool) -> AnnData:
    """Read a file under the keys of a model; ``reads`` are passed to :func:`fit_query`.

    Raises
    ------
    ValueError
        If the content does not match the suffix.
    """
    from alphastomics.cli._tensors import read_tensors
    from alphastomics.data import read_parquet
    from alphastomics.data._h5ad import read_h5ad

    if path.suffix == H5AD:
        cells = read_h5ad(path)
    else:
        cells = with_keys(read_parquet(path) if path.suffix == PARQUET else read_tensors(path, schema.genes), schema)
    return fit_query(cells, path, schema, **reads)


def read_reference(path: Path) -> AnnData:
    """Read a file to train on, under its own keys.

    Raises
    ------
    ValueError
        If the content does not match the suffix, or the slices measure different genes.
    """
    from alphastomics.data import read_parquet
    from alphastomics.data._h5ad import read_h5ad

    if path.suffix != PARQUET:
        return read_h5ad(path)
    cells = read_parquet(path)
    if _keys.MEASURED_IN in cells.varm:
        raise ValueError(
            f"{path} has slices that measure different genes; train on a dataset with --data-dir, or on a file with the genes "
            "that all slices measure"
        )
    return cells


def read_split(data_dir: Path, split: str, schema: TissueSchema, **reads: bool) -> AnnData:
    """Read a split of a dataset under the keys of a model; ``reads`` are passed to :func:`fit_query`.

    Raises
    ------
    ValueError
        If the model reads counts and the dataset has none.
    """
    from alphastomics.data import read_dataset
    from alphastomics.data.parquet._dataset import DatasetInfo

    if schema.transform == "log1p" and DatasetInfo.read(data_dir, check=False).schema.transform != "log1p":
        raise ValueError(
            f"{data_dir} holds transformed values, and this model reads counts; make the dataset without --skip-log-normalize"
        )
    return fit_query(with_keys(read_dataset(data_dir, split), schema), data_dir, schema, **reads)


def with_keys(cells: AnnData, schema: TissueSchema) -> AnnData:
    """Store slices, labels, positions and expression under the keys of a model; a model in 2D uses x and y."""
    names = {_keys.SLICE: schema.slice_key, _keys.CELL_TYPE: schema.cell_type_key}
    names = {name: key for name, key in names.items() if key not in (None, name) and name in cells.obs}
    cells.obs = cells.obs.drop(columns=[key for key in names.values() if key in cells.obs]).rename(columns=names)
    if _keys.SPATIAL in cells.obsm:
        cells.obsm[schema.position_key] = cells.obsm.pop(_keys.SPATIAL)[:, : schema.n_columns]
    if schema.layer is not None:
        cells.layers[schema.layer] = cells.X
    return cells
