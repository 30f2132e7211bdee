"""Nearest cells of another dataset in the embedding of a trained model."""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING

from sklearn.neighbors import NearestNeighbors

from alphastomics.data._checks import expression_matrix
from alphastomics.data._views import shallow_copy
from alphastomics.metrics._matrix import measured_genes

if TYPE_CHECKING:
    import numpy as np
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics


def nearest_cells(adata: AnnData, source: AnnData, model: AlphaSTomics, n_neighbors: int) -> NDArray[np.int64]:
    """Rows of `source` whose embeddings are nearest to those of the cells of `adata`, (n_cells, n_neighbors), nearest first.

    The embedding is that of ``layer="encoder"``: it depends on the expression of a cell alone. Positions, cell types and genes that the
    model lacks are not read.
    """
    if not isinstance(n_neighbors, Integral) or not 1 <= n_neighbors <= source.n_obs:
        raise ValueError(
            f"n_neighbors={n_neighbors!r} must be between 1 and {source.n_obs}, the number of cells of source; "
            "pass another number"
        )
    known, wanted = (
        model.get_latent_representation(_with_known_genes(without_cell_types(cells, model), model), layer="encoder")
        for cells in (source, adata)
    )
    index: NDArray[np.int64] = NearestNeighbors(n_neighbors=n_neighbors).fit(known).kneighbors(wanted)[1]
    return index


def _with_known_genes(adata: AnnData, model: AlphaSTomics) -> AnnData:
    """Cells with those genes of a model that they measure, as a view if they have others; all genes if there are none."""
    layer = model.schema.layer
    cells = _with_genes(adata, adata.var_names.isin(model.schema.genes))
    if layer is not None and layer not in cells.layers:
        return cells  # for which the model raises
    return _with_genes(cells, measured_genes(expression_matrix(cells, layer), cells.var_names))


def _with_genes(adata: AnnData, mask: NDArray[np.bool_]) -> AnnData:
    return adata if mask.all() or not mask.any() else adata[:, mask]


def without_cell_types(adata: AnnData, model: AlphaSTomics) -> AnnData:
    """Cells whose cell types a model cannot read, so that embeddings do not depend on labels; arrays are shared."""
    key = model.schema.cell_type_key
    if key is None or key not in adata.obs:
        return adata
    return shallow_copy(adata, obs=adata.obs.drop(columns=key))
