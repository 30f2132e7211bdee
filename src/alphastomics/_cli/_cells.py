"""Cells of a dataset as an AnnData."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData


def read_dataset(data_dir: Path, split: str) -> AnnData:
    """Cells of a split of a dataset, in memory.

    Raises
    ------
    FileNotFoundError, ValueError
        If the dataset is not there or damaged, or the split has no cells.
    """
    import anndata as ad
    import numpy as np
    import pandas as pd
    import scipy.sparse as sp

    from alphastomics import _keys
    from alphastomics.data.parquet._source import ParquetSource

    source = ParquetSource(data_dir, (split,))
    position = np.empty((source.n_cells, source.schema.n_dims))
    names = np.empty(source.n_cells, dtype=object)
    for cells in source.slices:
        position[cells.rows], names[cells.rows] = cells.position, cells.name
    obs = pd.DataFrame({_keys.SLICE: pd.Categorical(names)}, index=[f"cell_{i}" for i in range(source.n_cells)])
    counts = sp.vstack([source._load(group) for group in source.groups], format="csr")
    var = pd.DataFrame(index=list(source.schema.genes))
    return ad.AnnData(counts, obs=obs, var=var, obsm={source.schema.position_key: position})
