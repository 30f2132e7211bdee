r"""Clusters of embeddings of a held-out slice compared with cell types and spatial domains.

Rows:

- ``PCs``: 50 principal components of the held-out slice with the standard workflow of scanpy (``normalize_total``, ``log1p``,
  ``scale(max_value=10)``, ``pca``);
- ``PCs, averaged``: the mean of these over each cell and its 20 nearest neighbors in space, a simple method for spatial
  domains; for information;
- ``encoder``, ``transformer``, ``all``: ``model.get_latent_representation(layer=...)`` of the held-out slice without its
  positions, and with ``positions`` the same with ``use_positions=True``. The model has ``mode="any"`` and is
  trained on the reference without labels.

Every row is clustered by k-means (10 starts, k the number of labels; mean score of 5 runs with different seeds)
and by Louvain's method at resolution 1 on the graph of ``scanpy.pp.neighbors`` (15 neighbors). Clusters are compared with
``obs["cell_type"]`` and, if available, with ``obs["layer"]``, by the adjusted Rand index and by normalized mutual
information. Cells without a label are clustered but not compared.

Scores are named ``type_ari``, ``type_nmi``, ``layer_ari``, ``layer_nmi``; those of Louvain end in ``_louvain``. Run as
``python -m benchmarks.embeddings --benchmark starmap_mpfc``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import KDTree
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from benchmarks import _held_out, _models
from benchmarks._report import table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics
    from benchmarks._report import Results

    Array = NDArray[np.floating]

LABELS = {"type": "cell_type", "layer": "layer"}
LAYERS = ("encoder", "transformer", "all")
PCS, AVERAGED = "PCs", "PCs, averaged"
EMBEDDINGS = {f"{layer}{', positions' * used}": (layer, used) for used in (False, True) for layer in LAYERS}
N_COMPONENTS = 50
N_AVERAGED = 20  # neighbors in space
N_RUNS = 5
PARAMETERS = {"components": N_COMPONENTS, "averaged": N_AVERAGED, "runs": N_RUNS}


def components(cells: AnnData, *, seed: int) -> Array:
    """Principal components of cells whose ``X`` are counts, by the recipe of scanpy."""
    import scanpy as sc

    bare = cells.copy()
    sc.pp.normalize_total(bare)
    sc.pp.log1p(bare)
    sc.pp.scale(bare, max_value=10)
    sc.pp.pca(bare, n_comps=min(N_COMPONENTS, min(bare.shape) - 1), random_state=seed)
    return bare.obsm["X_pca"]


def averaged(values: Array, position: Array) -> Array:
    """Mean of the values (N, K) of each cell and its nearest neighbors."""
    k = min(N_AVERAGED + 1, len(values))
    return values[KDTree(position).query(position, k)[1]].mean(axis=1)


def embed(model: AlphaSTomics, cells: AnnData, layer: str, *, use_positions: bool) -> Array:
    """Embedding of the held-out slice; without ``positions`` they are removed from the object."""
    seen = cells.copy()
    if not use_positions:
        seen.obsm.clear()
    return model.get_latent_representation(seen, layer=layer, use_positions=use_positions)


def kmeans(values: Array, n_clusters: int, *, seed: int) -> list[NDArray[np.intp]]:
    """Clusters of each cell, of every run."""
    starts = np.random.default_rng(seed).integers(2**31, size=N_RUNS)
    return [KMeans(n_clusters, n_init=10, random_state=int(start)).fit_predict(values) for start in starts]


def louvain(values: Array, *, seed: int) -> NDArray[np.intp]:
    """Communities of the graph of nearest neighbors (Blondel et al. 2008, J. Stat. Mech. P10008)."""
    import anndata as ad
    import networkx as nx
    import scanpy as sc

    graph = ad.AnnData(obsm={"X_given": values}, shape=(len(values), 0))
    sc.pp.neighbors(graph, n_neighbors=min(15, len(values) - 1), use_rep="X_given", random_state=seed)
    edges = nx.from_scipy_sparse_array(graph.obsp["connectivities"])
    found = np.empty(len(values), dtype=np.intp)
    for number, members in enumerate(nx.community.louvain_communities(edges, seed=seed)):
        found[list(members)] = number
    return found


def score(values: Array, obs: pd.DataFrame, *, seed: int) -> dict[str, float]:
    """Scores of all clusterings of ``values`` (N, K) against the available labels."""
    scores: dict[str, float] = {}
    communities = louvain(values, seed=seed)
    for name, column in LABELS.items():
        if column not in obs:
            continue
        known = obs[column].notna().to_numpy()
        labels = obs[column].astype(str).to_numpy()[known]
        runs = [found[known] for found in kmeans(values, len(set(labels)), seed=seed)]
        for score, measure in (("ari", adjusted_rand_score), ("nmi", normalized_mutual_info_score)):
            scores[f"{name}_{score}"] = float(np.mean([measure(labels, found) for found in runs]))
            scores[f"{name}_{score}_louvain"] = float(measure(labels, communities[known]))
    return scores


def main(argv: Sequence[str] | None = None) -> None:
    """Score every unfinished fold and seed, and print the table."""
    options = _held_out.parse(_held_out.parser("embeddings"), argv)
    results, summary = _held_out.run_folds(run, options)
    print(table(summary, list(results.entries[0]["scores"])))


def run(
    results: Results, name: str, reference: AnnData, held_out: AnnData, *, seed: int, options: argparse.Namespace
) -> None:
    """All rows of one fold."""
    training = _models.training_parameters(options.minutes, mode="any")
    held_out = held_out.copy()
    found: dict[str, Callable[[], Array]] = {
        PCS: lambda: components(held_out, seed=seed),
        AVERAGED: lambda: averaged(components(held_out, seed=seed), held_out.obsm["spatial"]),
    }
    parameters = {row: PARAMETERS | (training if row in EMBEDDINGS else {}) for row in (*found, *EMBEDDINGS)}
    left = [row for row in parameters if not results.find(parameters[row], method=row, fold=name, seed=seed)]
    fields = {}
    if set(left) & set(EMBEDDINGS):
        model, train_seconds = _held_out.trained(reference, name, mode="any", seed=seed, options=options)
        fields = {"train_seconds": round(train_seconds, 1), "model": _models.fingerprint(model)}
    for row in left:
        start = time.perf_counter()
        if row in EMBEDDINGS:
            layer, used = EMBEDDINGS[row]
            values = embed(model, held_out, layer, use_positions=used)
        else:
            values = found[row]()
        seconds = time.perf_counter() - start
        _held_out.keep(
            results, row, name, seed, parameters=parameters[row], scores=score(values, held_out.obs, seed=seed),
            seconds=seconds, **(fields if row in EMBEDDINGS else {}),
        )  # fmt: skip


if __name__ == "__main__":
    main()
