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


def fit_query(cells: AnnData, path: Path, schema: TissueSchema, *, positions: bool) -> AnnData:
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
    """
    if positions:
        _name_slice(cells, path, schema)
    return cells


def _name_slice(cells: AnnData, path: Path, schema: TissueSchema) -> None:
    """A file that names no slices is one, as it is to ``preprocess``."""
    import pandas as pd

    key = schema.slice_key
    if key is None or key in cells.obs:
        return
    cells.obs[key] = pd.Categorical(np.repeat(path.stem, cells.n_obs))
    logger.info('%s has no obs["%s"]: its cells are one slice, %r.', path, key, path.stem)
