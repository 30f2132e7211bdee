"""What a compared model is trained on, and what it is asked about."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse as sp

from alphastomics.data._checks import expression_matrix
from alphastomics.data._slices import resolve_slice_key, slice_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from alphastomics.data import TissueSchema

logger = logging.getLogger(__name__)

SHARE_OF_ONE_SLICE = 0.2


class Fold(NamedTuple):
    """One division of the cells.

    Attributes
    ----------
    reference
        Cells to train on, registered.
    query
        Held-out cells.
    held_out
        Names of their slices.
    schema
        What a model of the reference reads.
    fingerprint
        Hash of all that is read of both.
    """

    reference: AnnData
    query: AnnData
    held_out: tuple[str, ...]
    schema: TissueSchema
    fingerprint: str


def make_fold(
    adata: AnnData, query: AnnData | None, chosen: tuple[str, ...] | None, arguments: Mapping[str, dict[str, Any]]
) -> Fold:
    """Divide the cells, and register those to train on.

    Parameters
    ----------
    adata, query, chosen
        As in :func:`split`.
    arguments
        Arguments of ``setup`` and ``init`` of the model.
    """
    from alphastomics.model import AlphaSTomics

    reference, asked, names = split(adata, query, chosen, arguments["setup"]["slice_key"])
    AlphaSTomics.setup_anndata(reference, **arguments["setup"])
    schema = AlphaSTomics(reference, **arguments["init"]).schema
    return Fold(reference, asked, names, schema, fingerprint([reference, asked], schema))


def choose_slices(held_out: Any, seed: int) -> tuple[str, ...] | None:
    """Slices that a seed holds out, sorted; None where nobody says."""
    chosen = held_out[seed] if isinstance(held_out, Mapping) else held_out
    if chosen is None:
        return None
    return tuple(sorted([chosen] if isinstance(chosen, str) else map(str, chosen)))


def split(
    adata: AnnData, query: AnnData | None, chosen: tuple[str, ...] | None, slice_key: str | None
) -> tuple[AnnData, AnnData, tuple[str, ...]]:
    """Copies of the cells to train on and of those that are held out, and the names of the slices of the latter.

    Raises
    ------
    KeyError
        If a slice is unknown.
    ValueError
        If nothing would be left to train on, or both a query and slices are given.
    """
    if query is not None:
        if chosen is not None:
            raise ValueError("pass query=, cells of their own, or held_out=, slices of adata, not both")
        names = tuple(name for name, _ in slice_rows(query, resolve_slice_key(query, slice_key)))
        return adata.copy(), query.copy(), names
    groups = dict(slice_rows(adata, resolve_slice_key(adata, slice_key)))
    if len(groups) == 1 and chosen is None:
        return _split_slice(adata, next(iter(groups)))
    chosen = (next(reversed(groups)),) if chosen is None else chosen
    if unknown := [name for name in chosen if name not in groups]:
        listed = ", ".join(map(repr, groups))
        raise KeyError(f"there is no slice {', '.join(map(repr, unknown))}; choose held_out=… from {listed}")
    if not chosen or len(chosen) == len(groups):
        raise ValueError("held_out=… must name some of the slices, and leave some to train on")
    rows = np.sort(np.concatenate([groups[name] for name in chosen]))
    return adata[np.setdiff1d(np.arange(adata.n_obs), rows)].copy(), adata[rows].copy(), chosen


def _split_slice(adata: AnnData, name: str) -> tuple[AnnData, AnnData, tuple[str, ...]]:
    logger.warning(
        "There is one slice: a random %.0f %% of its cells is held out. Their neighbours are among those that are "
        "trained on, and scores are too good; compare configurations with each other only.", 100 * SHARE_OF_ONE_SLICE,
    )  # fmt: skip
    order = np.random.default_rng(0).permutation(adata.n_obs)
    n_held_out = round(SHARE_OF_ONE_SLICE * adata.n_obs)
    held_out, rest = np.sort(order[:n_held_out]), np.sort(order[n_held_out:])
    return adata[rest].copy(), adata[held_out].copy(), (name,)


def fingerprint(parts: Sequence[AnnData], schema: TissueSchema) -> str:
    """Short hash of expression, genes, positions and slices."""
    digest = hashlib.sha256()
    for adata in parts:
        matrix: Any = expression_matrix(adata, schema.layer)
        if sp.issparse(matrix):
            matrix = sp.csr_matrix(matrix)
        arrays = [matrix.indptr, matrix.indices, matrix.data] if sp.issparse(matrix) else [matrix]
        for array in [*arrays, np.asarray(adata.obsm[schema.position_key])]:
            digest.update(str((array.shape, array.dtype)).encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        slices = [] if schema.slice_key is None else adata.obs[schema.slice_key].astype(str).tolist()
        digest.update("\n".join([*map(str, adata.var_names), *slices]).encode())
    return digest.hexdigest()[:16]
