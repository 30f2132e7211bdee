"""Training cells and held-out cells of a comparison."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from alphastomics._labels import label_name, label_names
from alphastomics.data._checks import check_key, expression_matrix
from alphastomics.data._slices import resolve_slice_key, slice_rows
from alphastomics.data._views import shallow_copy

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import TissueSchema
    from alphastomics.tl._reconstruct import Arguments


logger = logging.getLogger(__name__)

HELD_OUT_SHARE = 0.2  # of the cells of a single slice


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Training cells (registered), held-out cells, names of the held-out slices, and the schema of the training cells."""

    reference: AnnData
    query: AnnData
    held_out: tuple[str, ...]
    schema: TissueSchema

    def hash(self) -> str:
        """The first 16 digits of the SHA-256 of what a model reads: expression, genes, positions, and columns of ``obs``."""
        digest, schema = hashlib.sha256(), self.schema
        for adata in (self.reference, self.query):
            matrix: Any = expression_matrix(adata, schema.layer)
            if sp.issparse(matrix):
                matrix = sp.csr_matrix(matrix)
            arrays = [matrix.indptr, matrix.indices, matrix.data] if sp.issparse(matrix) else [matrix]
            for array in [*arrays, np.asarray(adata.obsm[schema.position_key])]:
                digest.update(str((array.shape, array.dtype)).encode())
                digest.update(np.ascontiguousarray(array).tobytes())
            keys = (schema.slice_key, schema.cell_type_key, schema.sequence_key)
            columns = [map(str, label_names(adata.obs[key])) for key in keys if key in adata.obs]
            digest.update("\n".join(chain(map(str, adata.var_names), *columns)).encode())
        return digest.hexdigest()[:16]


def make_splits(
    adata: AnnData, query: AnnData | None, held_out: Any, seeds: Sequence[int], arguments: Arguments
) -> dict[int, Split]:
    """The split of each seed; seeds that hold out the same slices share one."""
    if isinstance(held_out, Mapping) and (missing := [seed for seed in seeds if seed not in held_out]):
        raise KeyError(f"held_out=… has no slices for seed {missing[0]}; add them")
    made: dict[tuple[str, ...] | None, Split] = {}
    splits = {}
    for seed in seeds:
        names = held_out[seed] if isinstance(held_out, Mapping) else held_out
        if names is not None:
            names = tuple(sorted(map(label_name, [names] if isinstance(names, str | Integral) else names)))
        if names not in made:
            made[names] = _split(adata, query, names, arguments)
        splits[seed] = made[names]
    return splits


def _split(adata: AnnData, query: AnnData | None, chosen: tuple[str, ...] | None, arguments: Arguments) -> Split:
    """The training cells, registered, and the held-out cells; those of `adata` and `query` are not changed."""
    from alphastomics.data import AnnDataSource
    from alphastomics.model import AlphaSTomics

    slice_key = arguments["setup"]["slice_key"]
    if query is not None:
        if chosen is not None:
            raise ValueError("pass query=… or held_out=…, not both")
        label_key = arguments["setup"]["cell_type_key"]
        if label_key is not None:
            check_key("obs", query.obs, label_key, "cell_type_key")
        names = tuple(name for name, _ in slice_rows(query, resolve_slice_key(query, slice_key)))
        reference = adata
    else:
        rows, names = _held_out_rows(adata, chosen, slice_key)
        reference, query = adata[~rows], adata[rows]
    reference, query = shallow_copy(reference), shallow_copy(query)
    AlphaSTomics.setup_anndata(reference, **arguments["setup"])
    schema = AlphaSTomics(reference, **arguments["init"]).schema
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the placement
        AnnDataSource(query, schema, positions=True)
    return Split(reference=reference, query=query, held_out=names, schema=schema)


def _held_out_rows(
    adata: AnnData, chosen: tuple[str, ...] | None, slice_key: str | None
) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """Mask of the held-out cells, (n_cells,), and the names of their slices."""
    groups = dict(slice_rows(adata, resolve_slice_key(adata, slice_key)))
    mask = np.zeros(adata.n_obs, dtype=bool)
    if len(groups) == 1 and chosen is None:
        logger.warning(
            "There is only one slice: a random %.0f %% of its cells is held out. Their neighbors are in the training set, so "
            "scores are optimistic; only compare configurations with each other.", 100 * HELD_OUT_SHARE,
        )  # fmt: skip
        mask[np.random.default_rng(0).permutation(adata.n_obs)[: round(HELD_OUT_SHARE * adata.n_obs)]] = True
        return mask, tuple(groups)
    chosen = (next(reversed(groups)),) if chosen is None else chosen
    if unknown := [name for name in chosen if name not in groups]:
        listed = ", ".join(map(repr, groups))
        raise KeyError(f"unknown slice {', '.join(map(repr, unknown))}; choose held_out=… from {listed}")
    if not chosen or len(chosen) == len(groups):
        raise ValueError("held_out=… must name at least one slice and leave at least one for training")
    mask[np.concatenate([groups[name] for name in chosen])] = True
    return mask, chosen
