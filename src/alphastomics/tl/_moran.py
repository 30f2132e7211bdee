"""Moran's I of genes, slice by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from alphastomics._keys import MORAN, SPATIAL
from alphastomics.metrics import morans_i as score
from alphastomics.tl._expression import Transform, read_pair
from alphastomics.tl._tables import library_slices, read_coordinates, store

if TYPE_CHECKING:
    from anndata import AnnData


def morans_i(
    adata: AnnData,
    *,
    spatial_key: str = SPATIAL,
    layer: str | None = None,
    library_key: str | None = None,
    n_neighbors: int = 6,
    transform: Transform = "auto",
    key_added: str = MORAN,
    copy: bool = False,
) -> pd.DataFrame | None:
    """Spatial autocorrelation of every gene in every slice: Moran's I on the graph of nearest neighbours.

    To ask whether a prediction has the patterns of the tissue, call it with the predicted positions or the predicted
    layer too and compare; :func:`evaluate` does, with ``autocorrelation=True``.

    Parameters
    ----------
    adata
        Cells with expression and positions; those whose position is NaN are left out.
    spatial_key
        Where positions are in ``obsm``.
    layer
        Where expression is; ``X`` when None.
    library_key
        Column of ``obs`` that names the slice of each cell; ``"slice_id"`` if it is there when None.
    n_neighbors
        Neighbours of each cell.
    transform
        ``"log1p"`` at the median library size of the slice, ``"none"`` for values as they are, ``"auto"`` for
        ``"log1p"`` if and only if they are non-negative integers.
    key_added
        Where the table goes in ``uns``.
    copy
        Whether to return the table instead.

    Returns
    -------
    None, or the table: index slice and gene (in ``uns`` the gene is a column), column ``I``. It is NaN for genes that
    are constant or unmeasured in a slice, and for slices of no more than `n_neighbors` cells.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If a value cannot be used.
    """
    pair = read_pair(adata, None, layer=layer, prediction_layer=None, transform=transform)
    positions = read_coordinates(adata, spatial_key, "spatial_key")
    tables = {}
    for name, rows in library_slices(adata, library_key):
        cells = rows[~np.isnan(positions[rows]).any(axis=1)]
        values = pd.Series(np.nan, index=pd.Index(pair.genes, name="gene"), name="I")
        if len(cells) > n_neighbors:
            expression, _, measured = pair.scaled(cells)
            values[measured] = score(expression, positions[cells], n_neighbors=n_neighbors)
        tables[name] = values.to_frame()
    return store(adata, key_added, pd.concat(tables, names=["slice"]), copy=copy)
