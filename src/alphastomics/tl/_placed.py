"""Cells whose positions were predicted, by slice, with the true and the predicted positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from alphastomics._keys import CONFIDENCE_SUFFIX, PLACED_SUFFIX
from alphastomics.data._checks import check_key, check_type
from alphastomics.data._plane import constant_column, find_bounds
from alphastomics.data._slices import resolve_slice_key, slice_rows
from alphastomics.tl._tables import read_coordinates, read_uncertainty

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

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
    uncertainty
        Uncertainty of the prediction, (n_cells,), if there is one.
    unplaced
        Cells (n_cells,) that were not placed because of their confidence.
    truth, prediction
        Keys of ``obsm``; `prediction` is None if positions were not predicted.
    argument
        Argument that sets the key of the truth, for errors.
    """

    true: NDArray[np.float64]
    predicted: NDArray[np.float64]
    uncertainty: NDArray[np.float64] | None
    unplaced: NDArray[np.bool_]
    truth: str
    prediction: str | None
    argument: str

    @classmethod
    def read(cls, adata: AnnData, truth: str, prediction: str | None, *, argument: str) -> PositionPair:
        """Read both from ``obsm``, and the uncertainty from ``obs``."""
        predicted = None if prediction is None else read_coordinates(adata, prediction, "prediction")
        true = read_coordinates(adata, truth, argument)
        if predicted is None:
            predicted = true
        uncertainty = None if prediction is None else read_uncertainty(adata, prediction)
        unplaced: NDArray[np.bool_] = np.zeros(adata.n_obs, dtype=bool)
        if f"{prediction}{CONFIDENCE_SUFFIX}" in adata.obs:
            unplaced |= np.isnan(predicted).all(axis=1)
        return cls(
            true=true,
            predicted=predicted,
            uncertainty=uncertainty,
            unplaced=unplaced,
            truth=truth,
            prediction=prediction,
            argument=argument,
        )

    def in_equal_dims(self, slices: Sequence[PlacedSlice]) -> PositionPair:
        """The pair without a third column that only one of both has, and that is constant within each slice; raises otherwise."""
        if self.true.shape == self.predicted.shape:
            return self
        true, predicted = (_without_constant(x, slices) for x in (self.true, self.predicted))
        check_same_dims(true, predicted, self.truth, str(self.prediction), argument=self.argument)
        return replace(self, true=true, predicted=predicted)


def _without_constant(position: NDArray[np.float64], slices: Sequence[PlacedSlice]) -> NDArray[np.float64]:
    """Positions (n_cells, n_dims) without a third column that is constant within each slice."""
    finite = [x[np.isfinite(x).all(1)] for x in (position[piece.cells] for piece in slices)]
    bounds = [find_bounds(x) for x in finite if len(x)]
    column = constant_column(np.stack(bounds)) if bounds else None
    return position if column is None else np.delete(position, column, axis=1)


def check_same_dims(
    true: NDArray[np.float64], predicted: NDArray[np.float64], truth: str, prediction: str, *, argument: str = "truth"
) -> None:
    """Raise if true and predicted positions differ in dimension."""
    if true.shape != predicted.shape:
        raise ValueError(
            f'obsm["{truth}"] has shape {true.shape}, obsm["{prediction}"] has shape {predicted.shape}; '
            f"pass keys of positions of equal dimension as {argument}=… and prediction=…"
        )


def planar(
    true: NDArray[np.float64], predicted: NDArray[np.float64], *, free: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Positions of the same cells, (n, n_dims), without a third column that is constant in both.

    ``free`` is whether the two frames differ, so that the constants may differ.
    """
    if not len(true):
        return true, predicted
    groups = (true, predicted) if free else (np.concatenate([true, predicted]),)
    column = constant_column(np.stack([find_bounds(points) for points in groups]))
    if column is None:
        return true, predicted
    return np.delete(true, column, axis=1), np.delete(predicted, column, axis=1)


def read_slices(adata: AnnData, prediction: str | None, library_key: str | None) -> list[PlacedSlice]:
    """Slices, sorted by name; cells without a slice form the last one."""
    check_type(adata)
    key = slice_key(adata, prediction, library_key)
    placed = _placed(adata, prediction)
    return [
        PlacedSlice(name=name, cells=cells, placed=cells[placed[cells]])
        for name, cells in slice_rows(adata, key, missing=True)
    ]


def slice_key(adata: AnnData, prediction: str | None, library_key: str | None) -> str | None:
    """Column of ``obs`` with the slice of each cell, or None if all cells form one slice."""
    if library_key is not None:
        check_key("obs", adata.obs, library_key, "library_key")
        return library_key
    key = recorded(adata, prediction, "params").get("slice_key")
    return resolve_slice_key(adata, key if key in adata.obs else None)


def recorded(adata: AnnData, prediction: str | None, part: str) -> Mapping[str, Any]:
    """A part of the provenance of the prediction, or an empty one."""
    record = adata.uns.get(prediction)
    found = record.get(part) if isinstance(record, Mapping) else None
    return found if isinstance(found, Mapping) else {}


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


def cell_types(adata: AnnData, prediction: str | None, cell_type_key: str | None) -> NDArray[np.object_] | None:
    """Cell types (n_cells,), or None if they are not known."""
    if cell_type_key is not None:
        check_key("obs", adata.obs, cell_type_key, "cell_type_key")
        return adata.obs[cell_type_key].to_numpy(dtype=object)
    key = recorded(adata, prediction, "params").get("cell_type_key")
    return adata.obs[key].to_numpy(dtype=object) if key in adata.obs else None


def scored_cells(adata: AnnData, piece: PlacedSlice, pair: PositionPair) -> NDArray[np.int64]:
    """Placed cells of a slice with a true position; raises for infinite and missing values."""
    skipped = np.isnan(pair.true).any(axis=1) | pair.unplaced
    cells = piece.placed[~skipped[piece.placed]]
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
