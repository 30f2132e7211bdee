r"""Dissociated cells with an in situ reference, placements of them by other methods, and the score of held-out genes.

A gene g that no method reads judges a placement :math:`\hat x_i` of cell i by what the tissue shows around it,

.. math:: s_{ig} = \frac1k \sum_{j \in N(\hat x_i)} y_{jg}, \qquad k = 30,

the mean log-normalized expression of the k nearest reference cells, or, for values that are not counts, of the values as they are.
The score is the AUC with which :math:`s_{ig}` separates cells that express the gene from the others; if more than half of the cells
express it, cells above the median from the others. A direct transfer returns :math:`s_{ig}` without a position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
from scipy.spatial import KDTree
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from benchmarks._data import find_data

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

N_NEIGHBORS = 30
TEMPERATURE = 0.1  # of correlations in ``pearson_mode``
N_FOLDS = 4
DETECTION = 0.5  # share of the genes of a simulated dissociated cell that stay measured


@dataclass(frozen=True, kw_only=True)
class Fold:
    """A quarter of the genes is held out; ``reference`` and ``query`` have the others.

    ``shown`` (n_reference, n_held_out) is the held-out expression of the tissue, ``expressed`` (n_query, n_held_out) what the
    cells express, and ``truth`` (n_query, D) where they were, None if unknown.
    """

    name: str
    reference: ad.AnnData
    query: ad.AnnData
    shown: Array
    expressed: NDArray[np.bool_]
    truth: Array | None = None

    @property
    def position(self) -> Array:
        """Positions (n_reference, D) of the tissue."""
        return np.asarray(self.reference.obsm["spatial"], dtype=np.float64)

    def judge_places(self, places: Array) -> dict[str, float]:
        """Scores of positions (n_query, D), in the frame of the tissue; ``error`` is relative to the radius of the tissue."""
        near = KDTree(self.position).query(places, N_NEIGHBORS)[1]
        scores = self.judge_values(self.shown[near].mean(1))
        if self.truth is not None:
            radius = np.sqrt(((self.position - self.position.mean(0)) ** 2).sum(1).mean())
            scores["error"] = float(np.median(np.linalg.norm(places - self.truth, axis=1)) / radius)
        return scores

    def judge_values(self, values: Array) -> dict[str, float]:
        """AUC of values (n_query, n_held_out), mean over the genes."""
        pairs = zip(self.expressed.T, values.T, strict=True)
        return {"auc": float(np.mean([roc_auc_score(true, score) for true, score in pairs]))}


def dense(adata: ad.AnnData) -> Array:
    """Expression (n_cells, n_genes)."""
    return np.asarray(adata.X.toarray() if hasattr(adata.X, "toarray") else adata.X, dtype=np.float64)


def is_counts(x: Array) -> bool:
    """Whether values are integers other than 0 and 1."""
    return bool((x == np.round(x)).all() and x.max() > 1)


def log_normalized(x: Array, size: float | None = None) -> Array:
    """Counts (n_cells, n_genes) at the library size ``size``, their median when None, log1p; other values as they are."""
    if not is_counts(x):
        return x
    total = x.sum(1, keepdims=True)
    return np.log1p(x / np.maximum(total, 1) * (np.median(total) if size is None else size))


def features(fold: Fold) -> tuple[Array, Array]:
    """Log-normalized expression of reference and query at the library size of the reference."""
    x, y = dense(fold.reference), dense(fold.query)
    size = float(np.median(x.sum(1)))
    return log_normalized(x, size), log_normalized(y, size)


def make_folds(name: str, reference: ad.AnnData, query: ad.AnnData, truth: Array | None = None) -> list[Fold]:
    """Folds of held-out genes; genes that fewer than 5 cells express, or all of them, do not judge."""
    x, y = dense(reference), dense(query)
    expressed = y > 0
    common = expressed.mean(0) > 0.5
    expressed[:, common] = y[:, common] > np.median(y[:, common], axis=0)
    judges = np.flatnonzero((expressed.sum(0) >= 5) & ((~expressed).sum(0) >= 5) & (x.std(0) > 0))
    shown, folds = log_normalized(x), []
    order = np.random.default_rng(0).permutation(judges)
    for number in range(N_FOLDS):
        held_out = np.sort(order[number::N_FOLDS])
        kept = np.setdiff1d(np.arange(reference.n_vars), held_out)
        folds.append(
            Fold(
                name=f"{name}, genes {number}",
                reference=reference[:, kept].copy(),
                query=query[:, kept].copy(),
                shown=shown[:, held_out],
                expressed=expressed[:, held_out],
                truth=truth,
            )
        )
    return folds


def binarized(adata: ad.AnnData, threshold: Array | float) -> ad.AnnData:
    """Whether values are above a threshold, one for all genes or one for each."""
    result = adata.copy()
    result.X = (dense(adata) > threshold).astype(np.float32)
    return result


def osmfish(data_dir: str | None) -> list[Fold]:
    """Counts of osmFISH and of sequenced dissociated cells."""
    return make_folds("osmfish", *_osmfish(data_dir))


def osmfish_binary(data_dir: str | None) -> list[Fold]:
    """The same, 0 and 1: above the median of the gene in the tissue, and detected in the dissociated cells."""
    tissue, cells = _osmfish(data_dir)
    return make_folds("osmfish_binary", binarized(tissue, np.median(dense(tissue), axis=0)), binarized(cells, 0.0))


def _osmfish(data_dir: str | None) -> tuple[ad.AnnData, ad.AnnData]:
    from alphastomics.datasets import osmfish_cortex

    folder = find_data(data_dir) / "osmfish"
    tissue, cells = osmfish_cortex(folder if folder.is_dir() else None)
    tissue.obs["slice_id"] = "0"
    return tissue, cells


def drosophila_binary(data_dir: str | None) -> list[Fold]:
    """Half of the positions of an embryo against the other half, 0 and 1; the dissociated cells lose half of their ones."""
    adata = ad.read_h5ad(find_data(data_dir) / "drosophila_bdtnp_3d.h5ad")
    threshold = dense(adata).mean(0)
    adata.obs["slice_id"] = "embryo"
    rng = np.random.default_rng(0)
    order = rng.permutation(adata.n_obs)
    tissue, cells = (
        binarized(adata[np.sort(rows)], threshold) for rows in (order[: adata.n_obs // 2], order[adata.n_obs // 2 :])
    )
    truth = np.asarray(cells.obsm["spatial"], dtype=np.float64)
    query = ad.AnnData(X=cells.X * (rng.random(cells.shape) < DETECTION), var=cells.var)
    query.X = query.X.astype(np.float32)
    query.obs_names = [f"query_{i}" for i in range(query.n_obs)]
    return make_folds("drosophila_binary", tissue, query, truth)


DATA = {"osmfish": osmfish, "osmfish_binary": osmfish_binary, "drosophila_binary": drosophila_binary}


def chance(fold: Fold, *, seed: int) -> Array:
    """Positions of random reference cells."""
    rng = np.random.default_rng(seed)
    return fold.position[rng.integers(len(fold.position), size=fold.query.n_obs)]


def correlations(x: Array, y: Array) -> Array:
    """Pearson correlations (n_query, n_reference) of cells; 0 for constant ones."""
    x, y = (v - v.mean(1, keepdims=True) for v in (x, y))
    x, y = (v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-12) for v in (x, y))
    return y @ x.T


def pearson_argmax(fold: Fold, *, seed: int) -> Array:
    """Position of the reference cell with the largest correlation of expression, a random one of equal ones."""
    return _best_position(fold, correlations(*features(fold)), seed)


def spearman_argmax(fold: Fold, *, seed: int) -> Array:
    """The same for ranks of the genes within each cell."""
    return _best_position(fold, correlations(*(rankdata(x, axis=1) for x in features(fold))), seed)


def pearson_mode(fold: Fold, *, seed: int) -> Array:
    """Position of the reference cell around which correlations are largest.

    The softmax of the correlations of a cell, averaged over the nearest reference cells of each reference cell, is largest there.
    """
    logits = correlations(*features(fold)) / TEMPERATURE
    probability = np.exp(logits - logits.max(1, keepdims=True))
    probability /= probability.sum(1, keepdims=True)
    around = KDTree(fold.position).query(fold.position, N_NEIGHBORS)[1]
    return _best_position(fold, np.stack([row[around].mean(1) for row in probability]), seed)


def _best_position(fold: Fold, similarity: Array, seed: int) -> Array:
    order = np.random.default_rng(seed).permutation(similarity.shape[1])
    return fold.position[order[np.round(similarity, 9)[:, order].argmax(1)]]


def direct_transfer(fold: Fold, *, seed: int) -> Array:
    """Mean held-out expression of the reference cells with the nearest expression, without a position."""
    x, y = features(fold)
    near = NearestNeighbors(n_neighbors=N_NEIGHBORS, algorithm="brute").fit(x).kneighbors(y)[1]
    return fold.shown[near].mean(1)
