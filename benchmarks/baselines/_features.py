"""Shared code of the baselines: expression features, a common frame for all reference slices, training on contexts of a slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse
from scipy.spatial import cKDTree
from sklearn.decomposition import PCA
from sklearn.neighbors import NearestNeighbors

from benchmarks._placement import rigid_fit

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

CLIP = 10.0


def expression_features(reference: AnnData, query: AnnData, *, scale: bool) -> tuple[Array, Array]:
    """Centered expression of the genes both objects have, ``(n_ref, n_genes)`` and ``(n_query, n_genes)``.

    Counts are first brought to the median library size of the reference and log1p transformed. With ``scale`` every gene
    has unit variance (clipped at ±10); without, one factor serves all genes, so that weak genes weigh less. All moments
    are the reference's: moments of the query itself would hide real differences between the animals.
    """
    genes = reference.var_names[reference.var_names.isin(query.var_names)]
    if not len(genes):
        raise ValueError("reference and query share no gene in var_names")
    ref, new = (_dense(a[:, genes].X) for a in (reference, query))
    if is_counts(ref):
        size = np.median(ref.sum(axis=1))
        ref, new = (np.log1p(x * (size / np.maximum(x.sum(axis=1, keepdims=True), 1.0))) for x in (ref, new))
    mean = ref.mean(axis=0)
    if not scale:
        sd = np.sqrt(ref.var(axis=0).mean())
        return (ref - mean) / sd, (new - mean) / sd
    sd = ref.std(axis=0)
    sd[sd == 0] = 1.0
    return np.clip((ref - mean) / sd, -CLIP, CLIP), np.clip((new - mean) / sd, -CLIP, CLIP)


def is_counts(x: object) -> bool:
    """Whether all values are non-negative integers."""
    values = np.asarray(x.data if sparse.issparse(x) else x)
    return bool((values >= 0).all() and (values == np.round(values)).all())


def principal_components(ref: Array, new: Array, *, n_components: int = 50) -> tuple[Array, Array]:
    """Scores of reference and query on the principal components of the reference."""
    pca = PCA(min(n_components, *ref.shape), svd_solver="covariance_eigh").fit(ref)
    return pca.transform(ref), pca.transform(new)


def nearest(ref: Array, new: Array, *, n_neighbors: int) -> NDArray[np.intp]:
    """Rows of the ``n_neighbors`` rows of ``ref`` nearest to every row of ``new``; exhaustive, quicker than a tree here."""
    return NearestNeighbors(n_neighbors=n_neighbors, algorithm="brute").fit(ref).kneighbors(new, return_distance=False)


def slice_rows(reference: AnnData) -> list[NDArray[np.intp]]:
    """Row numbers of every slice of the reference, largest slice first."""
    names = reference.obs["slice_id"].astype(str).to_numpy()
    rows = [np.flatnonzero(names == name) for name in np.unique(names)]
    return sorted(rows, key=len, reverse=True)


def common_frame(reference: AnnData, components: Array, *, n_neighbors: int = 30) -> Array:
    """Positions of all reference slices in the frame of the largest one, ``(n_ref, n_dims)``.

    Cells of another slice are matched to the largest slice by expression alone: principal components averaged over each
    cell's spatial neighbors, then the mean position of the most similar neighborhoods. The slice is moved onto these
    positions by the best rotation, reflection and shift; its shape and scale stay as they are. No labels are used.
    """
    positions = np.asarray(reference.obsm["spatial"], dtype=np.float64).copy()
    anchor, *others = slice_rows(reference)
    if not others:
        return positions
    smooth = np.empty_like(components)
    for rows in (anchor, *others):
        near = cKDTree(positions[rows]).query(positions[rows], k=min(n_neighbors, len(rows)))[1]
        smooth[rows] = components[rows][near].mean(axis=1)
    for rows in others:
        similar = nearest(smooth[anchor], smooth[rows], n_neighbors=min(n_neighbors, len(anchor)))
        matched = positions[anchor][similar].mean(axis=1)
        rotation, shift = rigid_fit(positions[rows], matched)
        positions[rows] = positions[rows] @ rotation + shift
    return positions


def _dense(x: object) -> Array:
    return np.asarray(x.toarray() if sparse.issparse(x) else x, dtype=np.float64)
