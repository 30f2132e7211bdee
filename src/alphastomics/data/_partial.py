"""Partly observed expression."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from alphastomics.data._checks import check_genes, check_in_memory, expression_matrix
from alphastomics.data._schema import CLIP

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data._schema import TissueSchema


class PartialExpression(NamedTuple):
    """Partly observed expression.

    Attributes
    ----------
    values
        User units, shape (N, G), NaN where not observed.
    network
        Network units, shape (N, G), float32, NaN where not observed.
    library_size
        Library size over all genes, estimated from the observed genes of each cell, shape (N,); NaN where no gene is
        observed, and under ``transform="none"``.
    """

    values: NDArray[np.float64]
    network: NDArray[np.float32]
    library_size: NDArray[np.float64]


def read_partial(adata: AnnData, schema: TissueSchema) -> PartialExpression:
    """Read partly observed expression, with NaN for unobserved values.

    Parameters
    ----------
    adata
        The cells, in memory. Genes that it lacks are not observed; genes that the schema lacks are ignored.
    schema
        The schema of the model.

    Raises
    ------
    ValueError
        If values are infinite, or negative under ``"log1p"``.
    """
    check_in_memory(adata)
    columns = pd.Index(check_genes(adata.var_names)).get_indexer(pd.Index(schema.genes))
    present = np.flatnonzero(columns >= 0)
    matrix = expression_matrix(adata, schema.layer)[:, columns[present]]
    values = np.full((adata.n_obs, schema.n_genes), np.nan)
    values[:, present] = matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
    if np.isinf(values).any():
        raise ValueError("Expression has infinite values; unknown values are NaN.")
    known = np.isfinite(values)
    if schema.transform == "none":
        network = (values - schema.gene_mean) / schema.gene_scale
        return PartialExpression(values, _clip(network), np.full(adata.n_obs, np.nan))
    if (values[known] < 0).any():
        raise ValueError("Expression has negative values, which log1p does not support; unknown values are NaN.")
    share = known @ np.asarray(schema.gene_share)
    size = np.nansum(values, axis=1)
    total = np.divide(size, share, out=np.full(len(size), np.nan), where=share > 0)
    factor = np.divide(schema.target_library_size(), total, out=np.ones(len(size)), where=total > 0)
    network = (np.log1p(values * factor[:, None]) - schema.gene_mean) / schema.gene_scale
    return PartialExpression(values, _clip(network), total)


def _clip(network: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.clip(network, -CLIP, CLIP).astype(np.float32)
