"""Hide positions, so that a reconstruction can be scored against them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from alphastomics import _keys
from alphastomics.data._checks import read_position
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
    """Replace positions by NaN and keep the truth beside them.

    :func:`alphastomics.tl.reconstruct` then places these cells with the others as reference, and
    :func:`alphastomics.tl.evaluate` with ``truth=position_key + "_truth"`` scores them.

    Parameters
    ----------
    adata
        Cells with positions.
    slices
        Slices in which to hide positions; all when None.
    fraction
        Share of the cells of each of these slices to hide, in (0, 1): exactly ``round(fraction * n)`` of the n cells
        that have a position, drawn at random. None hides all.
    position_key
        Where positions are in ``obsm``, shape (n_cells, 2) or (n_cells, 3).
    slice_key
        Where the slice of a cell is in ``obs``. None takes ``obs["slice_id"]`` if it is there, else all cells are one
        slice.
    random_state
        Decides the draw.
    copy
        Whether to return a modified copy instead of writing to ``adata``.

    Returns
    -------
    None, or the copy. Written are ``obsm[position_key]``, float64 with NaN for the hidden cells, and
    ``obsm[position_key + "_truth"]``, the positions as they were.

    Raises
    ------
    KeyError
        If a key or a slice is missing.
    ValueError
        If neither ``slices`` nor ``fraction`` is given, ``fraction`` is out of range, no cell would be hidden, or
        positions were hidden before.

    Examples
    --------
    >>> asx.pp.hide_positions(adata, slices="slice_2")
    >>> asx.tl.reconstruct(adata)
    >>> asx.tl.evaluate(adata, truth="spatial_truth")
    """
    if slices is None and fraction is None:
        raise ValueError(
            "Nothing says what to hide: pass slices=… (all their cells), fraction=… (a random share) or both"
        )
    if fraction is not None and not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction} must lie between 0 and 1; pass slices=… to hide whole slices")
    truth_key = position_key + TRUTH_SUFFIX
    if truth_key in adata.obsm:
        raise ValueError(
            f'obsm["{truth_key}"] is there already: positions were hidden before. '
            f'Put them back with adata.obsm["{position_key}"] = adata.obsm.pop("{truth_key}")'
        )
    position = read_position(adata, position_key, missing=True)
    rng = np.random.default_rng(random_state)
    chosen = _choose_slices(adata, slices, slice_key)
    hidden = np.concatenate([_draw(rows[np.isfinite(position[rows]).all(axis=1)], fraction, rng) for rows in chosen])
    if not len(hidden):
        raise ValueError(f"No cell would be hidden: fraction={fraction} of these slices rounds to none; raise it")
    position[hidden] = np.nan
    result = adata.copy() if copy else adata
    result.obsm[truth_key] = result.obsm[position_key]
    result.obsm[position_key] = position
    logger.info(
        'Positions of %d of %d cells are hidden; the truth is in obsm["%s"].', len(hidden), len(position), truth_key
    )
    return result if copy else None


def _choose_slices(
    adata: AnnData, slices: str | Sequence[str] | None, slice_key: str | None
) -> list[NDArray[np.int64]]:
    """Row numbers of each slice asked for, in the order of their names."""
    key = resolve_slice_key(adata, slice_key)
    groups = dict(slice_rows(adata, key, missing=True))
    if slices is None:
        return list(groups.values())
    wanted = {slices} if isinstance(slices, str) else {str(name) for name in slices}
    if unknown := sorted(wanted - groups.keys()):
        where = "without slice_key all cells are one slice" if key is None else f'obs["{key}"]'
        raise KeyError(
            f"there is no slice {', '.join(map(repr, unknown))} "
            f"({where}; found: {', '.join(map(repr, groups))}); pass slices=… or slice_key=…"
        )
    if not wanted:
        raise ValueError("slices is empty; name at least one, or leave it out to hide a fraction of all")
    return [rows for name, rows in groups.items() if name in wanted]


def _draw(rows: NDArray[np.int64], fraction: float | None, rng: np.random.Generator) -> NDArray[np.int64]:
    return rows if fraction is None else rng.choice(rows, round(fraction * len(rows)), replace=False)
