"""Scores of predicted expression by slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pandas as pd

from alphastomics._keys import EXPRESSION_SCORES
from alphastomics.config import SetupConfig, Transform
from alphastomics.data._checks import check_choice, check_genes, check_in_memory, expression_matrix, summarize_values
from alphastomics.data._matrix import as_matrix
from alphastomics.metrics import expression_scores as score, log1p_normalized, median_library_size
from alphastomics.metrics._matrix import measured_genes
from alphastomics.tl._tables import as_table, baseline_orders, library_slices, obs_values, store

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.tl._tables import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpressionPair:
    """True and predicted expression of the same cells and genes.

    Parameters
    ----------
    true, predicted
        (n_cells, n_genes), CSR or dense.
    genes
        Names of the genes.
    counts
        Whether values are log-normalized before they are compared.
    """

    true: Any
    predicted: Any
    genes: tuple[str, ...]
    counts: bool

    def scaled(self, cells: NDArray[np.int64]) -> tuple[Any, Any, NDArray[np.bool_]]:
        """Both for cells of one slice on the scale of the scores, and the mask of genes, (n_genes,), measured in both.

        Other genes are left out. The library size is the median of the true one over the remaining genes.
        """
        same = self.predicted is self.true
        true = self.true[cells]
        predicted = true if same else self.predicted[cells]
        measured = measured_genes(true, self.genes) & measured_genes(predicted, self.genes)
        if not measured.all():
            true, predicted = true[:, measured], predicted[:, measured]
        if self.counts:
            size = median_library_size(true)
            size = size if np.isfinite(size) else 1.0  # every cell is empty, at any size
            true = log1p_normalized(true, size)
            predicted = true if same else log1p_normalized(predicted, size)
        return true, predicted, measured


def expression_scores(
    adata: AnnData,
    prediction: str | AnnData,
    *,
    layer: str | None = None,
    prediction_layer: str | None = None,
    library_key: str | None = None,
    cell_type_key: str | None = None,
    baselines: bool = False,
    transform: Transform = SetupConfig.transform,
    key_added: str = EXPRESSION_SCORES,
    copy: bool = False,
    random_state: int = 0,
) -> pd.DataFrame | None:
    """Score predicted expression against the true expression, one row per slice.

    By default, counts of both are scaled to the median library size of the true cells of the slice and log1p-transformed. A
    gene that is NaN in all cells of a slice is treated as unmeasured there and left out.

    Parameters
    ----------
    adata
        Cells with true expression.
    prediction
        A layer of `adata`, or another AnnData with the same cells, which are matched by name. Genes are matched by name too;
        only shared genes are scored.
    layer
        Layer with the true expression; ``X`` when None.
    prediction_layer
        Layer of the other AnnData with predicted expression; ``X`` when None.
    library_key
        Column of ``obs`` with the slice of each cell. By default ``"slice_id"``; without such a column all cells form one
        slice.
    cell_type_key
        Column of ``obs`` with cell types, for the oracle. Used only with `baselines`.
    baselines
        Add rows for the baselines ``chance``, the true expression of another cell, and, with `cell_type_key`, ``oracle``,
        the true expression of another cell of the same type.
    transform
        ``"log1p"`` as above, ``"none"`` for untransformed values, ``"auto"`` for ``"log1p"`` if the true values are
        counts.
    key_added
        Key of ``uns`` for the table.
    copy
        Return the table instead of writing it to `adata`.
    random_state
        Seed of the baselines.

    Returns
    -------
    None, or the table. It is indexed by ``slice`` or, with `baselines`, by ``slice`` and ``expression`` (``prediction``,
    ``chance`` or ``oracle``; a column in ``uns``). Its columns are ``n_cells``, ``n_genes`` (scored genes) and the scores of
    :func:`alphastomics.metrics.expression_scores`.

    Raises
    ------
    KeyError
        If a key or a cell is missing.
    ValueError
        If a measured value is not finite, no gene is shared, or values for log1p are negative.

    Examples
    --------
    >>> asx.tl.expression_scores(adata, "predicted", baselines=True, cell_type_key="cell_type", copy=True)
    """
    pair = read_pair(adata, prediction, layer=layer, prediction_layer=prediction_layer, transform=transform)
    types = obs_values(adata, cell_type_key, "cell_type_key")
    rows: Rows = {}
    for name, cells in library_slices(adata, library_key):
        true, predicted, _ = pair.scaled(cells)
        candidates = {"prediction": predicted}
        if baselines:
            orders = baseline_orders(len(cells), None if types is None else types[cells], random_state)
            candidates |= {kind: true[order] for kind, order in orders.items()}
        for kind, values in candidates.items():
            rows[name, kind] = {"n_cells": len(cells), "n_genes": true.shape[1], **score(true, values)}
    return store(adata, key_added, as_table(rows, "expression", keep=baselines), copy=copy)


def read_pair(
    adata: AnnData,
    prediction: str | AnnData | None,
    *,
    layer: str | None,
    prediction_layer: str | None,
    transform: str,
    argument: str = "prediction",
) -> ExpressionPair:
    """Read both, matched by names of cells and genes; without a prediction, both are the truth.

    ``argument`` sets the prediction, for errors.
    """
    check_in_memory(adata)
    true = expression_matrix(adata, layer)
    counts = needs_log1p(true, transform)
    genes: tuple[str, ...] = tuple(map(str, adata.var_names))
    if prediction is None:
        return ExpressionPair(true=true, predicted=true, genes=genes, counts=counts)
    if isinstance(prediction, str):
        if prediction_layer is not None:
            raise ValueError("prediction_layer=… has no effect if prediction=… is a layer of adata; drop it")
        return ExpressionPair(true=true, predicted=_layer(adata, prediction, argument), genes=genes, counts=counts)
    check_in_memory(prediction, argument)
    cells = match_names(adata.obs_names, prediction.obs_names)
    columns, shared = shared_genes(adata, prediction)
    predicted = expression_matrix(prediction, prediction_layer)[cells][:, columns[1]]
    return ExpressionPair(true=true[:, columns[0]], predicted=predicted, genes=shared, counts=counts)


def _layer(adata: AnnData, layer: str, argument: str) -> Any:
    if layer not in adata.layers:
        found = ", ".join(map(repr, adata.layers.keys())) or "nothing"
        raise KeyError(
            f'layers["{layer}"] is missing (found: {found}); pass the layer with predicted expression as {argument}=…'
        )
    return expression_matrix(adata, layer)


def needs_log1p(matrix: Any, transform: str) -> bool:
    """Whether to log-normalize: with ``"auto"``, if the values that are not NaN are counts, as for a model."""
    check_choice("transform", transform, get_args(Transform))
    if transform != "auto":
        return transform == "log1p"
    return summarize_values(as_matrix(matrix)).kind == "counts"


def match_names(names: pd.Index, available: pd.Index) -> NDArray[np.int64]:
    """Rows of ``available`` in the order of ``names``, (n_cells,); each name must occur exactly once."""
    if not available.is_unique:
        raise ValueError("obs_names of prediction are not unique; call prediction.obs_names_make_unique()")
    rows: NDArray[np.int64] = available.get_indexer(names).astype(np.int64)
    missing = names[rows < 0]
    if len(missing):
        listed = ", ".join(map(repr, missing[:5])) + (", …" if len(missing) > 5 else "")
        raise KeyError(
            f"{len(missing)} of {len(names)} cells are missing in prediction: {listed}; remove them from adata"
        )
    return rows


def shared_genes(adata: AnnData, other: AnnData) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], tuple[str, ...]]:
    """Columns of the shared genes in both objects, (n_shared,) each, and their names in the order of the first."""
    names, others = (pd.Index(check_genes(each.var_names)) for each in (adata, other))
    columns = others.get_indexer(names).astype(np.int64)
    shared = np.flatnonzero(columns >= 0)
    if not len(shared):
        raise ValueError(
            f"no gene is shared (first: {', '.join(names[:5])}, …; second: {', '.join(others[:5])}, …); check var_names"
        )
    return (shared, columns[shared]), tuple(names[shared])
