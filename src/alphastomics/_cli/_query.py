"""Whether a model can read some cells: asked before hours of work, and answered with the name of the file."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData

    from alphastomics.data import TissueSchema

logger = logging.getLogger(__name__)


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
