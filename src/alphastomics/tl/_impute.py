r"""Imputation of genes that a dataset does not measure, from another dataset.

.. math:: \hat x_{ig} = \frac1k \sum_{j \in N_i} x_{jg}

is the mean over the k nearest cells :math:`N_i` of the other dataset.
"""

from __future__ import annotations

import warnings
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import scipy.sparse as sp

from alphastomics._checks import check_seed
from alphastomics._provenance import result_record
from alphastomics.data._checks import check_genes, check_in_memory, check_text, expression_matrix
from alphastomics.metrics import log1p_normalized, median_library_size, pearson_per_gene
from alphastomics.metrics._matrix import measured_genes
from alphastomics.tl._checks import check_model
from alphastomics.tl._expression import needs_log1p
from alphastomics.tl._neighbors import nearest_cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics


def impute(
    adata: AnnData,
    source: AnnData,
    *,
    model: AlphaSTomics,
    genes: str | Sequence[str] | None = None,
    layer: str | None = None,
    n_neighbors: int = 50,
    validate: int = 0,
    key_added: str = "imputed",
    copy: bool = False,
    random_state: int = 0,
) -> AnnData | None:
    """Predict genes that a dataset does not measure from similar cells of another dataset.

    With dissociated cells as `source`, a tissue gets the genes that its panel lacks; with a tissue as `source`, dissociated or
    placed cells get those that they lack. Cells are compared by the embedding of their expression,
    ``model.get_latent_representation(layer="encoder")``, which uses the genes of the model; positions are not read.

    Parameters
    ----------
    adata
        Cells whose genes are predicted.
    source
        Cells that measure these genes.
    model
        A trained model.
    genes
        Names of the genes, or one name; all genes that `source` measures and `adata` lacks when None. A gene that is NaN in
        all cells is not measured.
    layer
        Layer of both with the expression; ``X`` when None. The embedding uses the layer of the model.
    n_neighbors
        Number of similar cells whose mean is the prediction.
    validate
        Number of random genes of both datasets and of the model that are held out and predicted from the others, to measure
        the accuracy; 0 for none.
    key_added
        Key of ``obsm`` and ``uns`` for the results.
    copy
        Return a modified copy instead of writing to `adata`.
    random_state
        Seed of the choice of the held-out genes.

    Returns
    -------
    None, or the modified copy. The following is written:

    - ``obsm[key_added]``: table of predictions, (n_cells, n_genes), columns are genes. Counts are scaled to the median library
      size of `source`, and their mean is returned; other values are averaged as they are;
    - ``uns[key_added + "_validation"]``: with `validate`, a table of the held-out genes with ``pearson``, the correlation of
      true and predicted expression over cells after log-normalization of counts; NaN for a constant gene;
    - ``uns[key_added]``: parameters, model and versions; see :func:`provenance`.

    Raises
    ------
    KeyError
        If `source` lacks a gene of `genes` or one of both the layer.
    ValueError
        If there is no gene to predict, `n_neighbors` exceeds the number of cells of `source`, or too few genes are shared to
        hold out `validate` of them.
    RuntimeError
        If the model is not trained.

    See Also
    --------
    transfer_labels : Transfer labels instead.

    Examples
    --------
    >>> asx.tl.impute(tissue, dissociated, model=model, validate=20)
    >>> tissue.uns["imputed_validation"]["pearson"].median()
    """
    check_in_memory(adata)
    check_in_memory(source, "source")
    check_model(model)
    check_text(key_added, "key_added", "obsm")
    measured = _measured(source, layer)
    wanted = _genes(adata, measured, [genes] if isinstance(genes, str) else genes, layer)
    held_out = _hold_out(adata, measured, model, layer, validate, random_state)
    expression = _normalized(source, layer)
    index = nearest_cells(adata, source, model, n_neighbors)
    result = adata.copy() if copy else adata
    result.obsm[key_added] = _mean(expression, _columns(source, wanted), index, adata.obs_names, wanted)
    result.uns.pop(f"{key_added}_validation", None)
    if held_out:
        result.uns[f"{key_added}_validation"] = _validation(adata, source, model, held_out, layer, n_neighbors)
    parameters = {"layer": layer, "n_neighbors": n_neighbors, "validate": validate, "random_state": random_state}
    result.uns[key_added] = result_record(model, "impute", parameters)
    return result if copy else None


def _measured(adata: AnnData, layer: str | None) -> pd.Index:
    """Names of the measured genes."""
    names = check_genes(adata.var_names)
    return pd.Index(names)[measured_genes(expression_matrix(adata, layer), names)]


def _genes(adata: AnnData, measured: pd.Index, genes: Sequence[str] | None, layer: str | None) -> list[str]:
    """Genes to predict, all of which are ``measured`` in the source."""
    if genes is None:
        wanted = list(measured[~measured.isin(_measured(adata, layer))])
        if not wanted:
            raise ValueError("adata lacks no gene of source; pass genes=… to predict genes that both measure")
        return wanted
    unknown = [gene for gene in genes if gene not in measured]
    if unknown:
        raise KeyError(
            f"source does not measure {len(unknown)} of the {len(genes)} genes: {', '.join(unknown[:5])}; remove them from genes=…"
        )
    if len(set(genes)) < len(genes):
        raise ValueError("genes=… has a name more than once; remove the duplicates")
    if not len(genes):
        raise ValueError("genes=… is empty; leave it out to predict all genes that adata lacks")
    return list(genes)


def _hold_out(
    adata: AnnData, measured: pd.Index, model: AlphaSTomics, layer: str | None, n_genes: int, seed: int
) -> list[str]:
    """Random genes that both datasets measure and the model has."""
    known = model.schema.genes
    shared = sorted(set(_measured(adata, layer)) & set(measured) & set(known)) if n_genes else []
    most = max(0, len(shared) - (len(known) + 1) // 2)  # the embedding requires half of the genes of the model
    if not isinstance(n_genes, Integral) or not 0 <= n_genes <= most:
        raise ValueError(
            f"validate={n_genes} genes cannot be held out: adata and source share {len(shared)} of the {len(known)} genes of the "
            f"model, half of which must remain; pass at most {most}"
        )
    return list(np.random.default_rng(check_seed(seed)).choice(shared, n_genes, replace=False))


def _validation(
    adata: AnnData, source: AnnData, model: AlphaSTomics, held_out: list[str], layer: str | None, n_neighbors: int
) -> pd.DataFrame:
    """Accuracy for genes that are removed from both datasets before cells are compared."""
    cells, others = (each[:, ~each.var_names.isin(held_out)] for each in (adata, source))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* genes are missing and treated as unmeasured", UserWarning)
        index = nearest_cells(cells, others, model, n_neighbors)
    true, known = (_normalized(each, layer, log=True) for each in (adata, source))
    predicted = _mean(known, _columns(source, held_out), index, adata.obs_names, held_out).to_numpy()
    pearson = pearson_per_gene(true[:, _columns(adata, held_out)], predicted)
    return pd.DataFrame({"pearson": pearson}, index=pd.Index(held_out, name="gene"))


def _normalized(adata: AnnData, layer: str | None, *, log: bool = False) -> Any:
    """Expression (n_cells, n_genes); counts are scaled to the median library size and, with ``log``, log1p-transformed."""
    x = expression_matrix(adata, layer)
    if not needs_log1p(x, "auto"):
        return x
    x = log1p_normalized(x, median_library_size(x))
    if log:
        return x
    return x.expm1() if sp.issparse(x) else np.expm1(x)


def _columns(adata: AnnData, genes: list[str]) -> NDArray[np.int64]:
    columns: NDArray[np.int64] = adata.var_names.get_indexer(genes).astype(np.int64)
    return columns


def _mean(
    x: Any, columns: NDArray[np.int64], index: NDArray[np.int64], names: pd.Index, genes: list[str]
) -> pd.DataFrame:
    """Mean of ``x`` (n_source, n_genes) over the rows ``index`` (n_cells, k)."""
    n_cells, k = index.shape
    weights = sp.csr_matrix(
        (np.full(index.size, 1 / k), index.ravel(), np.arange(n_cells + 1) * k), (n_cells, x.shape[0])
    )
    return pd.DataFrame(_dense(weights @ x[:, columns]).astype(np.float32), index=names, columns=genes)


def _dense(x: Any) -> NDArray[np.floating[Any]]:
    return x.toarray() if sp.issparse(x) else np.asarray(x)
