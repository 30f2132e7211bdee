"""Checks of AnnData objects; errors name the key, cell or gene and the remedy."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from alphastomics import _keys
from alphastomics._io._errors import format_names
from alphastomics._labels import label_names
from alphastomics.data._matrix import Matrix, as_matrix, flat_blocks, flat_index
from alphastomics.data._values import Evidence, ValueSummary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data._schema import ResolvedTransform

MIN_CELLS = 10


OTHER_CONTAINERS = {
    "AlphaSTomics": "pass a trained model as model=…",
    "SpatialData": "convert it with alphastomics.pp.from_spatialdata",
    "MuData": "pass one of its modalities",
    "Raw": "pass adata.raw.to_adata()",
}


def check_type(adata: object, argument: str = "adata") -> None:
    """Raise an error for an object that is no AnnData."""
    if isinstance(adata, (str, PathLike)):
        raise TypeError(
            f"{argument}={str(adata)!r} is a path; read the file first, such as with anndata.read_h5ad({str(adata)!r})"
        )
    if not isinstance(adata, ad.AnnData):
        kind = type(adata).__name__
        article = "an" if kind[0] in "AEIOU" else "a"
        remedy = OTHER_CONTAINERS.get(kind, "pass an AnnData")
        raise TypeError(f"{argument} is {article} {kind}, not an AnnData; {remedy}")


def check_in_memory(adata: AnnData, argument: str = "adata") -> None:
    """Raise an error for an object that is no AnnData, or one that is not in memory."""
    check_type(adata, argument)
    if adata.isbacked:
        raise ValueError(f"{argument} is backed by a file; read it into memory first with {argument}.to_memory().")


def check_text(key: object, argument: str, where: str) -> None:
    """Raise an error for a key that is not text."""
    if not isinstance(key, str):
        raise TypeError(f"{argument}={key!r} is not text; pass one key of {where}")


def check_key(
    where: str, mapping: Mapping[str, object] | pd.DataFrame, key: str, argument: str, remedy: str | None = None
) -> None:
    """Raise a KeyError for a missing key, and a TypeError for one that is not text."""
    check_text(key, argument, where)
    if key not in mapping:
        found = ", ".join(map(repr, mapping.keys())) or "nothing"
        raise KeyError(f'{where}["{key}"] is missing (found: {found}); {remedy or f"pass {argument}=…"}')


def read_sequence(adata: AnnData, key: str) -> NDArray[np.float64]:
    """Read the order of the cells (n,) from ``obs``, which must be finite."""
    check_key("obs", adata.obs, key, "sequence_key")
    values = pd.to_numeric(adata.obs[key].astype(object), errors="coerce").to_numpy(dtype=np.float64)
    absent = int((~np.isfinite(values)).sum())
    if absent:
        raise ValueError(
            f'obs["{key}"] is not a finite number for {absent} of {len(values)} cells; fill in the values, or leave out '
            "sequence_key=…"
        )
    return values


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise an error for a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(map(repr, choices))}")


def check_genes(names: Iterable[object]) -> tuple[str, ...]:
    """Gene names as strings, which must be unique."""
    index = pd.Index([str(name) for name in names])
    repeated = index[index.duplicated()].unique()
    if len(repeated):
        raise ValueError(
            f"{len(repeated)} gene names are not unique ({format_names(repeated)}); genes are matched by name: call "
            "adata.var_names_make_unique(), or merge them."
        )
    if not len(index):
        raise ValueError("there are no genes; pass an AnnData with variables")
    return tuple(index)


def expression_key(layer: str | None) -> str:
    """``X`` or a layer, for a message."""
    return "X" if layer is None else f'layers["{layer}"]'


def expression_matrix(adata: AnnData, layer: str | None) -> Matrix:
    """Read ``X`` or a layer as CSR or a plain array, copied only where the format changes."""
    where = expression_key(layer)
    if layer is None:
        values = adata.X
        if values is None:
            raw = "" if adata.raw is None else ", or use adata.raw.to_adata()"
            raise KeyError(
                f"X is missing; pass layer=… (layers: {', '.join(map(repr, adata.layers.keys())) or 'none'}){raw}"
            )
    else:
        check_key("layers", adata.layers, layer, "layer")
        values = adata.layers[layer]
    if not (sp.issparse(values) or isinstance(values, np.ndarray)):
        kind = f"{type(values).__module__}.{type(values).__name__}"
        raise ValueError(f"{where} is a {kind}; store a scipy.sparse or numpy array (adata.to_memory()).")
    return check_matrix(as_matrix(values), where)


def read_expression(
    adata: AnnData, layer: str | None, transform: str
) -> tuple[Matrix, ResolvedTransform, ValueSummary]:
    """Read and check expression; return the matrix, the resolved transform, and the summary of the values."""
    check_measured(adata)
    matrix = expression_matrix(adata, layer)
    summary = summarize_values(matrix)
    chosen = resolve_transform(transform, summary, expression_key(layer))
    check_values(summary, adata, layer, chosen)
    return matrix, chosen, summary


def check_measured(adata: AnnData) -> None:
    """Raise an error if slices lack genes that others measure, whose zeros are missing values."""
    measured = adata.varm.get(_keys.MEASURED_IN)
    if not isinstance(measured, pd.DataFrame):
        return
    present = set(label_names(adata.obs[_keys.SLICE])) if _keys.SLICE in adata.obs else set(measured)
    lacking = [name for name in measured if name in present and not measured[name].all()]
    if lacking:
        raise ValueError(
            f'{len(lacking)} slices lack genes that others measure, see varm["{_keys.MEASURED_IN}"], and their zeros '
            "are not values; use slices that measure the same genes: "
            f'adata[adata.obs["{_keys.SLICE}"] == {lacking[0]!r}, adata.varm["{_keys.MEASURED_IN}"][{lacking[0]!r}]].'
        )


def check_matrix(matrix: Matrix, where: str) -> Matrix:
    """Raise an error for a matrix that is not two-dimensional and numeric."""
    if matrix.ndim != 2:
        raise ValueError(f"{where} has {matrix.ndim} dimensions, not 2 (cells × genes).")
    if matrix.dtype.kind not in "biuf":
        raise ValueError(f"{where} holds {matrix.dtype} values; convert them to integers or floats.")
    return matrix


def summarize_values(matrix: Matrix) -> ValueSummary:
    """Summarize the stored values in one pass; see :mod:`alphastomics.data._values` for their kinds."""
    evidence, nonfinite, negative = Evidence(int(np.prod(matrix.shape))), None, None
    for offset, values in flat_blocks(matrix):
        finite = np.isfinite(values) if matrix.dtype.kind == "f" else np.ones(1, dtype=bool)
        if nonfinite is None and not finite.all():
            nonfinite = flat_index(matrix, offset + int(np.argmin(finite)))
        evidence.add(values if finite.all() else values[finite])
        if negative is None and matrix.dtype.kind in "if" and (below := values < 0).any():
            negative = flat_index(matrix, offset + int(np.argmax(below)))
    return ValueSummary(evidence.kind, evidence.integer, evidence.n_nonzero, nonfinite, negative)


def resolve_transform(transform: str, summary: ValueSummary, where: str = "X") -> ResolvedTransform:
    """Resolve ``"auto"``: ``"log1p"`` if and only if all values are counts; errors name the matrix, ``where``."""
    check_choice("transform", transform, ("auto", "log1p", "none"))
    if transform == "auto":
        if summary.kind == "signed" and summary.integer:
            raise ValueError(
                f"{where}: some values are negative and all are integers, so that they are neither counts nor standardized values; correct the "
                'negative values, or pass transform="none" if they are right'
            )
        return "log1p" if summary.counts else "none"
    return "log1p" if transform == "log1p" else "none"


def check_values(summary: ValueSummary, adata: AnnData, layer: str | None, transform: str) -> None:
    """Raise an error for NaN and infinity, and for negative values under ``"log1p"``."""
    where = expression_key(layer)

    def of(place: tuple[int, int]) -> str:
        return f"gene {str(adata.var_names[place[1]])!r} in cell {str(adata.obs_names[place[0]])!r}"

    if summary.nonfinite is not None:
        raise ValueError(
            f"{where} has NaN or infinite values, the first for {of(summary.nonfinite)}; "
            "remove these genes or cells, or replace the values."
        )
    if transform == "log1p" and summary.negative is not None:
        raise ValueError(
            f"{where} has negative values, the first for {of(summary.negative)}, which log1p does not support; "
            'pass the layer of raw counts or transform="none".'
        )


def read_position(adata: AnnData, key: str, *, missing: bool, n_dims: int | None = None) -> NDArray[np.float64]:
    """Read positions (n, D) from ``obsm`` as float64.

    ``missing`` is whether NaN, a cell without a position, is accepted; infinity never is. ``n_dims`` is D, 2 or 3 when
    None.
    """
    check_key("obsm", adata.obsm, key, "position_key")
    where, position = f'obsm["{key}"]', numeric_position(adata, key)
    allowed = (2, 3) if n_dims is None else (n_dims,)
    if position.shape[1] not in allowed:
        expected = " or ".join(map(str, allowed))
        raise ValueError(
            f"{where} has {position.shape[1]} columns, not {expected}; store floats of shape (n_cells, {expected})."
        )
    bad = ~np.isfinite(position) if not missing else np.isinf(position)
    if bad.any():
        cells = np.flatnonzero(bad.any(axis=1))
        raise ValueError(
            f"{where} has {'infinite' if missing else 'NaN or infinite'} values in {len(cells)} cells, the first "
            f"{str(adata.obs_names[cells[0]])!r}; remove these cells"
            + ("." if missing else ", or place them with tl.reconstruct.")
        )
    return position


def numeric_position(adata: AnnData, key: str) -> NDArray[np.float64]:
    """A copy of ``obsm[key]`` as float64, which must be real numbers of shape (n_cells, n_dims)."""
    where, remedy = f'obsm["{key}"]', "store floats of shape (n_cells, 2 or 3)"
    values = adata.obsm[key]
    try:
        if np.iscomplexobj(values):
            raise TypeError("complex numbers")
        position = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is not a numeric array; {remedy}.") from error
    if position.ndim != 2:
        raise ValueError(f"{where} has {position.ndim} dimensions, not 2 (cells × coordinates); {remedy}.")
    return position


def check_slice(name: str, position: NDArray[np.float64]) -> None:
    """Raise an error for a reference slice that is too small or has one position for all cells."""
    if len(position) < MIN_CELLS:
        raise ValueError(
            f"Slice {name!r} has {len(position)} cells with positions, fewer than {MIN_CELLS}; "
            "remove the slice, or correct slice_key."
        )
    if (position == position[0]).all():
        raise ValueError(f"All {len(position)} cells of slice {name!r} have the same position; check position_key.")
