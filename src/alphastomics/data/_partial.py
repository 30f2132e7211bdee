"""Partly observed expression."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from alphastomics._io._errors import format_names
from alphastomics.data._checks import (
    check_genes,
    check_in_memory,
    check_measured,
    expression_key,
    expression_matrix,
)
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
        If values are infinite, or negative under ``"log1p"``, no gene is in the schema, or slices lack genes that others measure.
    """
    check_in_memory(adata)
    check_measured(adata)
    names = check_genes(adata.var_names)
    columns = pd.Index(names).get_indexer(pd.Index(schema.genes))
    present = np.flatnonzero(columns >= 0)
    if not len(present):
        raise ValueError(
            f"var_names contains none of the {schema.n_genes} genes (reference: {format_names(schema.genes)}; these cells: "
            f"{format_names(names)}); use the gene identifiers of the reference, or leave out inpaint=True"
        )
    matrix = expression_matrix(adata, schema.layer)[:, columns[present]]
    values = np.full((adata.n_obs, schema.n_genes), np.nan)
    values[:, present] = matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
    where = expression_key(schema.layer)
    if np.isinf(values).any():
        raise ValueError(f"{where} has infinite values; replace them, by NaN if they are unknown")
    known = np.isfinite(values)
    if schema.transform == "none":
        network = (values - schema.gene_mean) / schema.gene_scale
        return PartialExpression(values, _clip(network), np.full(adata.n_obs, np.nan))
    if (values[known] < 0).any():
        raise ValueError(
            f"{where} has negative values, which log1p does not support; store raw counts, and NaN for unknown values"
        )
    share = known @ np.asarray(schema.gene_share)
    size = np.nansum(values, axis=1)
    total = np.divide(size, share, out=np.full(len(size), np.nan), where=share > 0)
    factor = np.divide(schema.target_library_size(), total, out=np.ones(len(size)), where=total > 0)
    network = (np.log1p(values * factor[:, None]) - schema.gene_mean) / schema.gene_scale
    return PartialExpression(values, _clip(network), total)


def _clip(network: NDArray[np.float64]) -> NDArray[np.float32]:
    return np.clip(network, -CLIP, CLIP).astype(np.float32)
