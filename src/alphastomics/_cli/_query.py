"""Whether a model can read some cells: asked before hours of work, and answered with the name of the file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from alphastomics._cli._options import QueryOptions
    from alphastomics.data import TissueSchema
    from alphastomics.model import AlphaSTomics

logger = logging.getLogger(__name__)


SAMPLED = Path("sampled.h5ad")


def check_sample(query: QueryOptions, output: Path, sample_mode: str, n_cells: int | None) -> None:
    """Refuse options of ``sample`` that contradict each other, and to replace a file that nobody named.

    Raises
    ------
    FileExistsError
        If ``output`` is the default and there.
    ValueError
        If the number of cells is not said, said twice, or said where it is not needed.
    """
    joint = sample_mode == "joint"
    if n_cells is not None and not joint:
        raise ValueError("--n-cells is for --sample-mode joint; here the input says how many cells there are")
    if n_cells is not None and query.names_cells:
        raise ValueError("--n-cells and the input both say how many cells to draw; leave --n-cells out, or the input")
    if joint and n_cells is None and not query.names_cells:
        raise ValueError(
            "--sample-mode joint draws new slices; say by --n-cells how many cells they have, or by --input-data or "
            "--data-dir, as many as there"
        )
    if output == SAMPLED and output.is_file():
        raise FileExistsError(f"{output} is there already; name a file with --output")


def check_mode(model: AlphaSTomics, wanted: Sequence[str], flag: str) -> None:
    """Refuse a model that was not made for what a flag asks of it."""
    if model.mode not in ("any", *wanted):
        raise ValueError(
            f"{flag} asks for what this model has never seen: it was trained with --mode {model.mode}; train one with --mode "
            f"{wanted[0]}, or --mode any"
        )


def fit_query(cells: AnnData, path: Path, schema: TissueSchema, *, positions: bool, expression: bool = True) -> AnnData:
    """Cells as a model reads them.

    Parameters
    ----------
    cells
        They, under the keys of the model; changed in place.
    path
        Where they come from.
    schema
        That of the model.
    positions
        Whether the model reads where they lie, and their slices with that.
    expression
        Whether it reads their expression.

    Raises
    ------
    KeyError
        If the positions or the layer are missing.
    ValueError
        If too few genes are there, or positions have other dimensions.
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
        found = ", ".join(map(repr, cells.layers.keys())) or "nothing"
        raise KeyError(
            f'{path}: layers["{schema.layer}"] is missing (found: {found}); store there what the reference of this model '
            "has there"
        )
    try:
        names = check_genes(cells.var_names)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    n_missing = len(set(schema.genes).difference(names))
    if 2 * n_missing > schema.n_genes:
        raise ValueError(
            f"{path}: {n_missing} of the {schema.n_genes} genes of this model are missing, more than half (it has "
            f"{', '.join(map(repr, schema.genes[:3]))}, …; the file {', '.join(map(repr, names[:3]))}, …); use the same "
            "names of genes, or train a model on the genes that are shared"
        )


def _check_positions(cells: AnnData, path: Path, schema: TissueSchema) -> None:
    key, n_dims = schema.position_key, schema.n_dims
    if key not in cells.obsm:
        found = ", ".join(map(repr, cells.obsm.keys())) or "nothing"
        raise KeyError(
            f'{path}: obsm["{key}"] is missing (found: {found}); store the positions where the reference of this model has '
            "them"
        )
    position = cells.obsm[key]
    if position.ndim == 2 and position.shape[1] == 3 and n_dims == 2:
        cells.obsm[key] = np.asarray(position)[:, :2]  # as of a dataset
    elif position.ndim == 2 and position.shape[1] < n_dims:
        raise ValueError(
            f'{path}: obsm["{key}"] has {position.shape[1]} coordinates, and this model is of {n_dims} dimensions; take a '
            f"model that was trained in {position.shape[1]}, or cells with {n_dims} coordinates"
        )


def _name_slice(cells: AnnData, path: Path, schema: TissueSchema) -> None:
    """A file that names no slices is one, as it is to ``preprocess``."""
    import pandas as pd

    key = schema.slice_key
    if key is None or key in cells.obs:
        return
    cells.obs[key] = pd.Categorical(np.repeat(path.stem, cells.n_obs))
    logger.info('%s has no obs["%s"]: its cells are one slice, %r.', path, key, path.stem)
