"""Hide known positions to score a reconstruction against them."""

from __future__ import annotations

import logging
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from alphastomics import _keys
from alphastomics._checks import check_seed
from alphastomics._labels import label_name
from alphastomics.data._checks import check_type, read_position
from alphastomics.data._slices import resolve_slice_key, slice_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

TRUTH_SUFFIX = "_truth"


def hide_positions(
    adata: AnnData,
    *,
    slices: str | Sequence[str] | None = None,
    fraction: float | None = None,
    position_key: str = _keys.SPATIAL,
    slice_key: str | None = None,
    random_state: int = 0,
    copy: bool = False,
) -> AnnData | None:
    """Replace positions of some cells by NaN, and keep a copy of all positions.

    :func:`alphastomics.tl.reconstruct` then predicts the hidden positions, and :func:`alphastomics.tl.evaluate` with
    ``truth=position_key + "_truth"`` scores them.

    Parameters
    ----------
    adata
        Cells with positions.
    slices
        Slices in which to hide positions; all when None.
    fraction
        Fraction of the cells of each of these slices to hide, in (0, 1): ``round(fraction * n)`` of the n cells with a
        position are chosen at random. None hides all.
    position_key
        Key of ``obsm`` with the positions, (n_cells, 2 or 3).
    slice_key
        Column of ``obs`` with the slice of each cell. By default ``"slice_id"``; without such a column all cells form one
        slice.
    random_state
        Seed of the random choice.
    copy
        Return a modified copy instead of writing to `adata`.

    Returns
    -------
    None, or the modified copy. The following is written:

    - ``obsm[position_key]``: positions in float64, NaN for hidden cells, (n_cells, 2 or 3);
    - ``obsm[position_key + "_truth"]``: the original positions.

    Raises
    ------
    KeyError
        If a key or a slice is missing.
    ValueError
        If neither `slices` nor `fraction` is given, `fraction` is out of range, no cell would be hidden, or positions are
        hidden already.

    Examples
    --------
    >>> asx.pp.hide_positions(adata, slices="slice_2")
    >>> asx.tl.reconstruct(adata)
    >>> asx.tl.evaluate(adata, truth="spatial_truth")
    """
    check_type(adata)
    if slices is None and fraction is None:
        raise ValueError("pass slices=… to hide whole slices, fraction=… to hide random cells, or both")
    if fraction is not None and not (isinstance(fraction, Real) and 0 < fraction < 1):
        raise ValueError(f"fraction={fraction!r} must be between 0 and 1; pass slices=… to hide whole slices")
    truth_key = position_key + TRUTH_SUFFIX
    if truth_key in adata.obsm:
        raise ValueError(
            f'obsm["{truth_key}"] exists: positions are hidden already; '
            f'restore them with adata.obsm["{position_key}"] = adata.obsm.pop("{truth_key}")'
        )
    position = read_position(adata, position_key, missing=True)
    rng = np.random.default_rng(check_seed(random_state))
    chosen = _choose_slices(adata, slices, slice_key)
    hidden = np.concatenate([_draw(rows[np.isfinite(position[rows]).all(axis=1)], fraction, rng) for rows in chosen])
    if not len(hidden):
        raise ValueError(f"fraction={fraction} hides no cell of these slices; increase it")
    position[hidden] = np.nan
    result = adata.copy() if copy else adata
    result.obsm[truth_key] = result.obsm[position_key]
    result.obsm[position_key] = position
    logger.info(
        'Positions of %d of %d cells are hidden; the original positions are in obsm["%s"].',
        len(hidden),
        len(position),
        truth_key,
    )
    return result if copy else None


def _choose_slices(
    adata: AnnData, slices: str | Sequence[str] | None, slice_key: str | None
) -> list[NDArray[np.int64]]:
    """Rows (n,) of each chosen slice, sorted by name."""
    key = resolve_slice_key(adata, slice_key)
    groups = dict(slice_rows(adata, key, missing=True))
    if slices is None:
        return list(groups.values())
    names = {label_name(name) for name in ([slices] if np.isscalar(slices) else slices)}
    if unknown := sorted(names - groups.keys()):
        where = "all cells form one slice" if key is None else f'obs["{key}"]'
        raise KeyError(
            f"unknown slice {', '.join(map(repr, unknown))} "
            f"({where}; found: {', '.join(map(repr, groups))}); pass slices=… or slice_key=…"
        )
    if not names:
        raise ValueError("slices=… is empty; pass at least one, or leave it out to hide a fraction of all")
    return [rows for name, rows in groups.items() if name in names]


def _draw(rows: NDArray[np.int64], fraction: float | None, rng: np.random.Generator) -> NDArray[np.int64]:
    return rows if fraction is None else rng.choice(rows, round(fraction * len(rows)), replace=False)
