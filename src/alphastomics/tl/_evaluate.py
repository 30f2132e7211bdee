"""Scores of predicted positions, and optionally of expression and clusters, by slice."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from alphastomics._keys import CELL_TYPE, PLACED_SUFFIX, RECONSTRUCTED, SPATIAL
from alphastomics.config import SetupConfig
from alphastomics.data._checks import check_key
from alphastomics.data._slices import resolve_slice_key, slice_rows
from alphastomics.metrics import position_scores, subsample_cells
from alphastomics.metrics._neighbors import N_NEIGHBORS
from alphastomics.tl._extras import ExtraScores
from alphastomics.tl._tables import as_table, baseline_orders, read_coordinates

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.config import Transform
    from alphastomics.tl._tables import Rows

logger = logging.getLogger(__name__)

N_NAMES = 5  # cells listed in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedSlice:
    """Cells of one slice as ascending rows of the AnnData; ``placed`` are those whose position was predicted."""

    name: str
    cells: NDArray[np.int64]
    placed: NDArray[np.int64]

    @property
    def free(self) -> bool:
        """Whether no position was known, so that the frame of the prediction is arbitrary."""
        return len(self.placed) == len(self.cells)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionPair:
    """True and predicted positions of all cells.

    Parameters
    ----------
    true, predicted
        (n_cells, n_dims). Without a prediction, both are the true positions.
    truth, prediction
        Keys of ``obsm``; `prediction` is None if positions were not predicted.
    argument
        Argument that sets the key of the truth, for errors.
    """

    true: NDArray[np.float64]
    predicted: NDArray[np.float64]
    truth: str
    prediction: str | None
    argument: str

    @classmethod
    def read(cls, adata: AnnData, truth: str, prediction: str | None, *, argument: str) -> PositionPair:
        """Read both from ``obsm``."""
        predicted = None if prediction is None else read_coordinates(adata, prediction, "prediction")
        true = read_coordinates(adata, truth, argument)
        if predicted is None:
            predicted = true
        check_same_dims(true, predicted, truth, str(prediction), argument=argument)
        return cls(true=true, predicted=predicted, truth=truth, prediction=prediction, argument=argument)


def evaluate(
    adata: AnnData,
    *,
    truth: str = SPATIAL,
    prediction: str | None = RECONSTRUCTED,
    library_key: str | None = None,
    cell_type_key: str | None = None,
    baselines: bool = False,
    n_neighbors: int = N_NEIGHBORS,
    max_cells: int | None = None,
    random_state: int = 0,
    layer: str | None = None,
    expression_layer: str | None = None,
    transform: Transform = SetupConfig.transform,
    autocorrelation: bool = False,
    reference: AnnData | None = None,
    cluster_key: str | None = None,
    label_key: str = CELL_TYPE,
) -> pd.DataFrame:
    """Score predictions of one or several kinds against the truth, one row per slice.

    Positions are scored by default; `expression_layer`, `autocorrelation`, `reference` and `cluster_key` add further scores.
    Only predicted positions are scored: cells for which ``obs[prediction + "_placed"]`` is False, if there is such a column,
    and cells without a true position (NaN) are skipped. In slices with known positions, which fix the frame,
    ``aligned_rmsd`` is computed without alignment. Nothing is written to `adata`.

    Parameters
    ----------
    adata
        Cells with true and predicted values.
    truth
        Key of ``obsm`` with the true positions, (n_cells, n_dims).
    prediction
        Key of ``obsm`` with the predicted positions, (n_cells, n_dims), in the units of the truth. None if positions were
        not predicted: position scores are left out, and the other scores use the positions under `truth`.
    library_key
        Column of ``obs`` with the slice of each cell. By default ``uns[prediction]["params"]["slice_key"]``, otherwise
        ``"slice_id"``; without such a column all cells form one slice.
    cell_type_key
        Column of ``obs`` with cell types, for the oracle. By default ``uns[prediction]["params"]["cell_type_key"]``.
    baselines
        Add rows for the baselines ``chance``, the true positions permuted over all cells, and, if cell types are known,
        ``oracle``, the true positions permuted within each cell type. Expression and clusters are permuted likewise.
    n_neighbors
        Number of neighbors for ``knn_preservation``, whose chance level is ``n_neighbors / (n_cells - 1)``.
    max_cells
        Maximum number of cells of each slice to score; see :func:`alphastomics.metrics.subsample_cells`.
    random_state
        Seed of that selection, of the rows that ``distance_spearman`` samples, and of the baselines.
    layer
        Layer with the true expression; ``X`` when None.
    expression_layer
        Layer with predicted expression. Adds ``n_genes``, the scores of :func:`expression_scores`, and
        ``moran_correlation``.
    transform
        Scale on which expression is compared; see :func:`expression_scores`.
    autocorrelation
        Add ``moran_correlation``, the correlation over genes between Moran's I of the true expression on the true positions
        and Moran's I of the predicted expression (or the true one, without a prediction) on the predicted positions.
    reference
        Other, real slices with positions under the key `truth`. Adds ``modality_agreement``; see
        :func:`modality_agreement`.
    cluster_key
        Column of ``obs`` with clusters. Adds the scores of :func:`cluster_scores`.
    label_key
        Column of ``obs`` with the labels that clusters are compared with.

    Returns
    -------
    A table indexed by ``slice`` or, with `baselines`, by ``slice`` and ``positions`` (``prediction``, ``chance`` or
    ``oracle``). Its columns are ``n_cells`` (scored cells), ``n_skipped`` (cells without a true position), the scores of
    :func:`alphastomics.metrics.position_scores`, and the further scores. Undefined scores, for example of a single cell, are
    NaN.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If there is nothing to score, a position or expression value is invalid, or the dimensions of true and predicted
        positions differ.

    See Also
    --------
    position_scores, expression_scores, cluster_scores, modality_agreement

    Examples
    --------
    >>> asx.tl.reconstruct(query, reference)
    >>> asx.tl.evaluate(query, baselines=True, cell_type_key="cell_type")
    """
    if prediction is None and expression_layer is None and cluster_key is None and reference is None:
        raise ValueError(
            "there is nothing to score; pass prediction=…, expression_layer=…, cluster_key=… or reference=…"
        )
    pair = PositionPair.read(adata, truth, prediction, argument="truth")
    extras = ExtraScores.read(
        adata,
        truth=truth,
        layer=layer,
        expression_layer=expression_layer,
        transform=transform,
        autocorrelation=autocorrelation,
        reference=reference,
        library_key=None if reference is None else _slice_key(adata, prediction, library_key),
        label_key=label_key,
        cluster_key=cluster_key,
        random_state=random_state,
    )
    return score_slices(
        adata,
        pair,
        extras=extras,
        library_key=library_key,
        cell_type_key=cell_type_key,
        baselines=baselines,
        n_neighbors=n_neighbors,
        max_cells=max_cells,
        random_state=random_state,
    )


def score_slices(
    adata: AnnData,
    pair: PositionPair,
    *,
    extras: ExtraScores | None = None,
    library_key: str | None,
    cell_type_key: str | None,
    baselines: bool,
    n_neighbors: int,
    max_cells: int | None,
    random_state: int,
) -> pd.DataFrame:
    """Scores of each slice; the arguments are those of :func:`evaluate`."""
    types = _cell_types(adata, pair.prediction, cell_type_key) if baselines else None
    score = partial(position_scores, n_neighbors=n_neighbors, max_cells=max_cells, random_state=random_state)
    rows: Rows = {}
    for piece in read_slices(adata, pair.prediction, library_key):
        if len(piece.placed) == 0:
            continue
        cells = _scored_cells(adata, piece, pair)
        true = pair.true[cells]
        chosen = np.arange(len(cells)) if max_cells is None else subsample_cells(len(cells), max_cells, random_state)
        counts = {"n_cells": min(len(cells), max_cells or len(cells)), "n_skipped": len(piece.placed) - len(cells)}
        orders: dict[str, NDArray[np.int64] | None] = {"prediction": None}
        if baselines:
            orders |= baseline_orders(len(cells), None if types is None else types[cells], random_state)
        for kind, order in orders.items():
            positions = pair.predicted[cells] if order is None else true[order]
            row: dict[str, float] = {**counts}
            if pair.prediction is not None:
                row |= score(true, positions, align=piece.free)
            if extras is not None:
                row |= extras.score(cells, order, true, positions, chosen=chosen)
            rows[piece.name, kind] = row
    return _table(rows, pair, baselines=baselines)


def check_same_dims(
    true: NDArray[np.float64], predicted: NDArray[np.float64], truth: str, prediction: str, *, argument: str = "truth"
) -> None:
    """Raise if true and predicted positions differ in dimension."""
    if true.shape != predicted.shape:
        raise ValueError(
            f'obsm["{truth}"] has shape {true.shape}, obsm["{prediction}"] has shape {predicted.shape}; '
            f"pass keys of positions of equal dimension as {argument}=… and prediction=…"
        )


def read_slices(adata: AnnData, prediction: str | None, library_key: str | None) -> list[PlacedSlice]:
    """Slices, sorted by name; cells without a slice form the last one."""
    key = _slice_key(adata, prediction, library_key)
    placed = _placed(adata, prediction)
    return [
        PlacedSlice(name=name, cells=cells, placed=cells[placed[cells]])
        for name, cells in slice_rows(adata, key, missing=True)
    ]


def _slice_key(adata: AnnData, prediction: str | None, library_key: str | None) -> str | None:
    if library_key is not None:
        check_key("obs", adata.obs, library_key, "library_key")
        return library_key
    recorded = _recorded(adata, prediction, "slice_key")
    return resolve_slice_key(adata, recorded if recorded in adata.obs else None)


def _recorded(adata: AnnData, prediction: str | None, parameter: str) -> Any:
    """A parameter in the provenance of the prediction, or None."""
    return adata.uns.get(prediction, {}).get("params", {}).get(parameter)


def _placed(adata: AnnData, prediction: str | None) -> NDArray[np.bool_]:
    key = f"{prediction}{PLACED_SUFFIX}"
    if prediction is None or key not in adata.obs:
        return np.ones(adata.n_obs, dtype=bool)
    column = adata.obs[key]
    if not pd.api.types.is_bool_dtype(column) or column.isna().any():
        raise ValueError(
            f'obs["{key}"] must be boolean without missing values; correct it, or delete it to score all cells'
        )
    return column.to_numpy(dtype=bool)


def _cell_types(adata: AnnData, prediction: str | None, cell_type_key: str | None) -> NDArray[np.object_] | None:
    if cell_type_key is not None:
        check_key("obs", adata.obs, cell_type_key, "cell_type_key")
        return adata.obs[cell_type_key].to_numpy(dtype=object)
    recorded = _recorded(adata, prediction, "cell_type_key")
    return adata.obs[recorded].to_numpy(dtype=object) if recorded in adata.obs else None


def _scored_cells(adata: AnnData, piece: PlacedSlice, pair: PositionPair) -> NDArray[np.int64]:
    """Placed cells of a slice with a true position; raises for infinite and missing values."""
    cells = piece.placed[~np.isnan(pair.true[piece.placed]).any(axis=1)]
    for key, positions, remedy in (
        (pair.truth, pair.true, "correct the values, or set them to NaN to skip the cells"),
        (pair.prediction, pair.predicted, "place these cells, or remove them"),
    ):
        bad = cells[~np.isfinite(positions[cells]).all(axis=1)]
        if len(bad):
            names = ", ".join(adata.obs_names[bad[:N_NAMES]].astype(str)) + (", …" if len(bad) > N_NAMES else "")
            raise ValueError(
                f'obsm["{key}"] is not finite for {len(bad)} cells of slice {piece.name!r} ({names}); {remedy}'
            )
    return cells


def _table(rows: Rows, pair: PositionPair, *, baselines: bool) -> pd.DataFrame:
    if not any(row["n_cells"] for row in rows.values()):
        raise ValueError(
            f'no cell can be scored: no placed cell has a position in obsm["{pair.truth}"]; '
            f"pass the key of the true positions as {pair.argument}=…"
            if rows
            else f'no cell can be scored: there are no cells, or obs["{pair.prediction}_placed"] is False for all'
        )
    table = as_table(rows, "positions", keep=True)
    skipped = int(table["n_skipped"].xs("prediction", level="positions").sum())
    if skipped:
        logger.info('%d cells without a position in obsm["%s"] were skipped.', skipped, pair.truth)
    return table if baselines else table.droplevel("positions")
