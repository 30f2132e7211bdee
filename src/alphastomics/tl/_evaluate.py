"""Compare predicted with true tissue, slice by slice."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from alphastomics._keys import CELL_TYPE, PLACED_SUFFIX, RECONSTRUCTED, SPATIAL
from alphastomics.data._checks import check_key
from alphastomics.data._slices import resolve_slice_key, slice_rows
from alphastomics.metrics import judge_cells, position_scores
from alphastomics.tl._extras import ExtraScores
from alphastomics.tl._tables import as_table, baseline_orders, read_coordinates

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.tl._expression import Transform
    from alphastomics.tl._tables import Rows

logger = logging.getLogger(__name__)

N_NAMES = 5  # cells named in an error


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedSlice:
    """The cells of one slice, as indices into the rows of the AnnData.

    Parameters
    ----------
    name
        Name of the slice.
    cells
        All its cells, ascending.
    placed
        Those whose position was predicted; the others were known. All of them where nothing was recorded.
    """

    name: str
    cells: NDArray[np.int64]
    placed: NDArray[np.int64]

    @property
    def free(self) -> bool:
        """Whether no cell was known, so that the frame of the prediction is arbitrary."""
        return len(self.placed) == len(self.cells)


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionPair:
    """True positions of all cells, and those that are judged.

    Parameters
    ----------
    true, predicted
        (n_cells, n_dims); the true ones twice where positions were not predicted.
    truth, prediction
        Their keys in ``obsm``; no prediction where positions were not predicted.
    argument
        The argument that names the truth, for errors.
    """

    true: NDArray[np.float64]
    predicted: NDArray[np.float64]
    truth: str
    prediction: str | None
    argument: str

    @classmethod
    def read(cls, adata: AnnData, truth: str, prediction: str | None, *, argument: str) -> PositionPair:
        """Read both; a ``KeyError`` names the argument that can change the key."""
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
    n_neighbors: int = 20,
    max_cells: int | None = None,
    random_state: int = 0,
    layer: str | None = None,
    expression_layer: str | None = None,
    transform: Transform = "auto",
    autocorrelation: bool = False,
    reference: AnnData | None = None,
    cluster_key: str | None = None,
    label_key: str = CELL_TYPE,
) -> pd.DataFrame:
    """Score predicted positions, and where asked for expression and clusters, against the truth, one row per slice.

    Only what was predicted counts: where ``obs[prediction + "_placed"]`` exists, known cells are left out, slices
    without a placed cell have no row, and in slices that had known cells, which fix the frame, ``aligned_rmsd`` takes
    the plain difference instead of aligning first (``procrustes_disparity`` always compares shapes alone). A cell whose
    truth is NaN is skipped and counted. The table is returned and nothing is written: `adata` is not modified.

    Parameters
    ----------
    adata
        Cells with both positions; expression is read only for scores that need it.
    truth
        Key of the true positions in ``obsm``, (n_cells, n_dims).
    prediction
        Key of the predicted positions in ``obsm``, (n_cells, n_dims), in the units of the truth. None where positions
        were not predicted: there are then no scores of positions, and the prediction is judged at the positions under
        `truth`. In a joint sample, that `reference` judges, these are the sampled ones.
    library_key
        Column of ``obs`` that names the slice of each cell. By default the one that
        ``uns[prediction]["params"]["slice_key"]`` names, else ``obs["slice_id"]``, else all cells are one slice.
    cell_type_key
        Column of ``obs`` with cell types, for the oracle. By default the one that
        ``uns[prediction]["params"]["cell_type_key"]`` names, if any. Read with `baselines` only.
    baselines
        Add the rows that give a score its meaning: ``chance``, the true positions shuffled over the cells, and, where
        cell types are known, ``oracle``, the true positions shuffled within each type. Expression and clusters are
        shuffled likewise.
    n_neighbors
        Neighbors that ``knn_preservation`` compares; its chance level is ``n_neighbors / (n_cells - 1)``.
    max_cells
        Score at most this many cells of each slice (:func:`alphastomics.metrics.judge_cells`).
    random_state
        Seed of that choice, of the rows that ``distance_spearman`` samples, and of the baselines.
    layer
        Where the true expression is; ``X`` when None.
    expression_layer
        Layer with predicted expression: adds ``n_genes`` and the scores of :func:`expression_scores`, and what
        `autocorrelation` adds.
    transform
        Scale on which expression is compared; see :func:`expression_scores`.
    autocorrelation
        Add ``moran_correlation``, over genes, between Moran's I of the true expression on the true positions and that
        of the prediction: the predicted expression, where there is one, on the predicted positions, where there are.
    reference
        Real slices, apart from those of `adata`, with positions under the same key as the truth: adds
        ``modality_agreement`` of the expression and positions of the prediction with them.
    cluster_key
        Column of ``obs`` with clusters: adds the scores of :func:`cluster_scores` over the cells that have a label
        and a cluster.
    label_key
        Column of ``obs`` with the labels that clusters are compared with.

    Returns
    -------
    A table whose index is the slice; with `baselines`, the slice and ``prediction``, ``chance`` or ``oracle`` (levels
    ``slice`` and ``positions``). Columns: ``n_cells`` that were scored, ``n_skipped`` for want of a truth, and the
    scores of :func:`alphastomics.metrics.position_scores`, NaN where they are undefined, as in a slice of one cell; then
    those that were asked for.

    Raises
    ------
    KeyError
        If a key is missing.
    ValueError
        If a predicted position to be scored is not finite, a true one is infinite, the two differ in dimension, or no
        cell can be scored; if nothing was predicted; if expression or clusters cannot be used.
    """
    if prediction is None and expression_layer is None and cluster_key is None and reference is None:
        raise ValueError("there is nothing to score: pass prediction=, expression_layer=, cluster_key= or reference=")
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
    """Score what was placed, slice by slice; the arguments are those of :func:`evaluate`."""
    types = _cell_types(adata, pair.prediction, cell_type_key) if baselines else None
    score = partial(position_scores, n_neighbors=n_neighbors, max_cells=max_cells, random_state=random_state)
    rows: Rows = {}
    for piece in read_slices(adata, pair.prediction, library_key):
        if len(piece.placed) == 0:
            continue
        cells = _scored_cells(adata, piece, pair)
        true = pair.true[cells]
        chosen = np.arange(len(cells)) if max_cells is None else judge_cells(len(cells), max_cells, random_state)
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
    """Refuse a truth, named by `argument`, and a prediction of different dimension."""
    if true.shape != predicted.shape:
        raise ValueError(
            f'obsm["{truth}"] is of shape {true.shape} and obsm["{prediction}"] of shape {predicted.shape}; '
            f"name two that have the same number of coordinates with {argument}=… and prediction=…"
        )


def read_slices(adata: AnnData, prediction: str | None, library_key: str | None) -> list[PlacedSlice]:
    """Split the cells into slices, sorted by name; cells without a slice are one set, the last."""
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
    """Look up a parameter of the run that made the prediction, or None."""
    return adata.uns.get(prediction, {}).get("params", {}).get(parameter)


def _placed(adata: AnnData, prediction: str | None) -> NDArray[np.bool_]:
    key = f"{prediction}{PLACED_SUFFIX}"
    if prediction is None or key not in adata.obs:
        return np.ones(adata.n_obs, dtype=bool)
    column = adata.obs[key]
    if not pd.api.types.is_bool_dtype(column) or column.isna().any():
        raise ValueError(f'obs["{key}"] must be True or False for every cell; fill it, or delete it to score all cells')
    return column.to_numpy(dtype=bool)


def _cell_types(adata: AnnData, prediction: str | None, cell_type_key: str | None) -> NDArray[np.object_] | None:
    if cell_type_key is not None:
        check_key("obs", adata.obs, cell_type_key, "cell_type_key")
        return adata.obs[cell_type_key].to_numpy(dtype=object)
    recorded = _recorded(adata, prediction, "cell_type_key")
    return adata.obs[recorded].to_numpy(dtype=object) if recorded in adata.obs else None


def _scored_cells(adata: AnnData, piece: PlacedSlice, pair: PositionPair) -> NDArray[np.int64]:
    """Placed cells of a slice that have a truth, after refusing values that cannot be compared."""
    cells = piece.placed[~np.isnan(pair.true[piece.placed]).any(axis=1)]
    for key, positions, remedy in (
        (pair.truth, pair.true, "correct them, or set them to NaN to skip these cells"),
        (pair.prediction, pair.predicted, "place these cells, or leave them out"),
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
            f'no cell can be scored: none that was placed has a position in obsm["{pair.truth}"]; '
            f"pass {pair.argument}=… with the key of the positions that were held out"
            if rows
            else f'no cell can be scored: there are none, or obs["{pair.prediction}_placed"] marks none as placed'
        )
    table = as_table(rows, "positions", keep=True)
    skipped = int(table["n_skipped"].xs("prediction", level="positions").sum())
    if skipped:
        logger.info('%d cells have no position in obsm["%s"] and were not scored', skipped, pair.truth)
    return table if baselines else table.droplevel("positions")
