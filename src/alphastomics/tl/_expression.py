"""Compare predicted with true expression, slice by slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import scipy.sparse as sp

from alphastomics._keys import EXPRESSION_SCORES
from alphastomics.data._checks import check_choice, check_genes, expression_matrix
from alphastomics.data._matrix import flat_blocks
from alphastomics.metrics import expression_scores as score
from alphastomics.metrics import log1p_normalized, median_library_size
from alphastomics.metrics._matrix import measured_genes
from alphastomics.tl._tables import as_table, baseline_orders, library_slices, obs_values, store

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.tl._tables import Rows

Transform = Literal["auto", "log1p", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpressionPair:
    """True and predicted expression of the same cells and genes, in the units of the user.

    Parameters
    ----------
    true, predicted
        (n_cells, n_genes), CSR or dense.
    genes
        Names of the genes.
    counts
        Whether values are brought to one library size and logarithms are taken before they are compared.
    """

    true: Any
    predicted: Any
    genes: tuple[str, ...]
    counts: bool

    def scaled(self, cells: NDArray[np.int64]) -> tuple[Any, Any, NDArray[np.bool_]]:
        """Both for some cells of one slice, on the scale of the scores, without genes that either leaves unmeasured.

        The library size is the median of the truth over the genes that remain; the mask says which do.
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
    transform: Transform = "auto",
    key_added: str = EXPRESSION_SCORES,
    copy: bool = False,
    random_state: int = 0,
) -> pd.DataFrame | None:
    """Score predicted expression against the true one, one row per slice.

    Both are compared on log1p at the median library size of the true cells of the slice, whatever their depth was. A
    gene that is NaN in every cell of a slice, in truth or prediction, was not measured there: it counts for nothing.

    Parameters
    ----------
    adata
        Cells with their true expression.
    prediction
        A layer of `adata`, or another object that holds the same cells, by name, in any order. Genes are then matched
        by name, and those that only one of the two has are left out.
    layer
        Where the true expression is; ``X`` when None.
    prediction_layer
        Where the predicted expression is in another object; ``X`` when None.
    library_key
        Column of ``obs`` that names the slice of each cell; ``"slice_id"`` if it is there when None.
    cell_type_key
        Column of ``obs`` with cell types, for the oracle. Read with `baselines` only.
    baselines
        Add the rows that give a score its meaning: ``chance``, the true expression of another cell, and, with
        `cell_type_key`, ``oracle``, that of another cell of the same type.
    transform
        ``"log1p"`` as above, ``"none"`` to compare values as they are, ``"auto"`` for ``"log1p"`` if and only if the
        true values are non-negative integers.
    key_added
        Where the table goes in ``uns``.
    copy
        Whether to return the table instead.
    random_state
        Seed of the baselines.

    Returns
    -------
    None, or the table. Its index is the slice; with `baselines`, the slice and ``prediction``, ``chance`` or
    ``oracle`` (level ``expression``; a column in ``uns``). Columns: ``n_cells``, ``n_genes`` that were scored, and the
    scores of :func:`alphastomics.metrics.expression_scores`.

    Raises
    ------
    KeyError
        If a key or a cell is missing.
    ValueError
        If a value of a measured gene is not finite, no gene is shared, or log1p is asked of negative values.

    Examples
    --------
    >>> asx.tl.expression_scores(adata, "predicted", baselines=True, cell_type_key="cell_type", copy=True)
    """
    pair = read_pair(adata, prediction, layer=layer, prediction_layer=prediction_layer, transform=transform)
    types = obs_values(adata, cell_type_key, "cell_type_key") if baselines else None
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
    adata: AnnData, prediction: str | AnnData | None, *, layer: str | None, prediction_layer: str | None, transform: str
) -> ExpressionPair:
    """Read both sides and match them by the names of cells and genes; without a prediction, the truth is both."""
    true = expression_matrix(adata, layer)
    counts = scores_counts(true, transform)
    genes: tuple[str, ...] = tuple(map(str, adata.var_names))
    if prediction is None:
        return ExpressionPair(true=true, predicted=true, genes=genes, counts=counts)
    if isinstance(prediction, str):
        if prediction_layer is not None:
            raise ValueError("prediction_layer= is for a prediction in another object; here prediction= is the layer")
        return ExpressionPair(true=true, predicted=_layer(adata, prediction), genes=genes, counts=counts)
    cells = match_names(adata.obs_names, prediction.obs_names)
    columns, shared = shared_genes(adata, prediction)
    predicted = expression_matrix(prediction, prediction_layer)[cells][:, columns[1]]
    return ExpressionPair(true=true[:, columns[0]], predicted=predicted, genes=shared, counts=counts)


def _layer(adata: AnnData, layer: str) -> Any:
    if layer not in adata.layers:
        found = ", ".join(map(repr, adata.layers.keys())) or "nothing"
        raise KeyError(f'layers["{layer}"] is missing (found: {found}); name the layer with the predicted expression')
    return expression_matrix(adata, layer)


def scores_counts(matrix: Any, transform: str) -> bool:
    """Settle the transform: ``"auto"`` is log1p if and only if all values are non-negative integers, NaN aside."""
    check_choice("transform", transform, ("auto", "log1p", "none"))
    if transform != "auto":
        return transform == "log1p"
    return all(
        bool(((values >= 0) & (np.trunc(values) == values) | np.isnan(values)).all())
        for _, values in flat_blocks(sp.csr_matrix(matrix) if sp.issparse(matrix) else matrix)
    )


def match_names(wanted: pd.Index, found: pd.Index) -> NDArray[np.int64]:
    """Rows of ``found`` in the order of ``wanted``, each of which must be there once."""
    if not found.is_unique:
        raise ValueError("names of cells occur more than once in prediction; call prediction.obs_names_make_unique()")
    rows: NDArray[np.int64] = found.get_indexer(wanted).astype(np.int64)
    missing = wanted[rows < 0]
    if len(missing):
        listed = ", ".join(map(repr, missing[:5])) + (", …" if len(missing) > 5 else "")
        raise KeyError(
            f"{len(missing)} of {len(wanted)} cells are missing in prediction: {listed}; subset adata to its"
        )
    return rows


def shared_genes(adata: AnnData, other: AnnData) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], tuple[str, ...]]:
    """Columns, in both objects, of the genes that both have, and their names in the order of the first."""
    names, others = (pd.Index(check_genes(each.var_names)) for each in (adata, other))
    columns = others.get_indexer(names).astype(np.int64)
    shared = np.flatnonzero(columns >= 0)
    if not len(shared):
        raise ValueError(f"no gene is shared (here {', '.join(names[:5])}, …, there {', '.join(others[:5])}, …)")
    return (shared, columns[shared]), tuple(names[shared])
