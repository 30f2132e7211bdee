"""Classification of the neighborhoods of sampled slices and of real held-out tissue.

``model.sample(mode="joint")`` samples a slice with as many cells as the held-out one. A histogram gradient boosting
classifier (scikit-learn's, 100 iterations) is trained to distinguish cells of the sample from cells of the held-out slice by their
neighborhoods; the area under its ROC curve, .5 for a perfect sample, is compared with that for real slices of the
reference against the same held-out slice, because animals differ too.

Features of a cell:

- its 20 principal components, and the mean of those of its 8 nearest cells in the tissue. They are fitted on the
  standardized log1p expression of the reference, at its median library size, to which every cell is scaled;
- the distances to these 8 cells, nearest first, over the cell spacing of a uniform tissue, root mean square radius / N^(1/D).

Two scores. For ``auc`` every tissue's components have mean 0 and variance 1 over its own cells. Depth and batch shift and
scale the components of a whole specimen; without standardization single cells distinguish two mice, both areas are near 1, and
the score does not discriminate. ``auc_raw`` omits it: it includes whether means and variances are those of real tissue,
and is not informative if the area of the reference is near 1.

The features do not depend on the frame, unit and size of the tissue, nor on the number of its cells. They do depend on the
spacing of cells: cells that overlap, form clusters or leave holes are nearer or farther than this spacing, which is a property of the
whole tissue. Division by the median of the distances themselves would remove this dependence.

Neighbors are determined among all cells of a tissue; then both classes are reduced to the same number of cells, that of the
smallest tissue of the fold, in every comparison. Folds are of spatial blocks: every tissue is divided into 4 x 4 blocks of
equal numbers of cells (quantiles along the first principal axis, within each along the second; the third, if any, is not
divided). Blocks of the two tissues are paired so that their mean components differ least in sum, and pairs go to 5 folds as
a whole: were a region held out of one tissue and its like in the other trained on, the classifier would take test cells
for the other tissue, and the area for two equal tissues would lie well below .5. A cell is not trained on if it is one
of the neighbors of a test cell, or has one. The score is the mean over folds.

- ``sample``: a sampled slice, mean over 4 samples of a model;
- ``reference, nearest``, ``reference, mean``: the smallest and the mean area of the reference slices, the first is the
  strictest comparison;
- ``reference, shuffled``: the first reference slice with its cells permuted over their positions: real expression and
  positions without relation. If it is not far above ``reference, nearest``, the score is not informative.

The output also has sample - reference. Run as ``python -m benchmarks.joint --benchmark starmap_mpfc``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedGroupKFold

from benchmarks import _held_out, _models
from benchmarks._placement import nearest_neighbors
from benchmarks._report import mean_sd, table
from benchmarks.baselines._features import CLIP
from benchmarks.pos_to_expr import normalized

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from benchmarks._report import Results

    Array = NDArray[np.float64]

N_COMPONENTS = 20
N_NEIGHBORS = 8
CUTS = 4
N_FOLDS = 5
DRAWS = 4  # of a model: each is drawn from the cells of one slice
SAMPLE, NEAREST, MEAN, SHUFFLED = "sample", "reference, nearest", "reference, mean", "reference, shuffled"


class Tissue(NamedTuple):
    """Features of a tissue for the classifier, and blocks for its folds.

    Attributes
    ----------
    features
        (N, number of features).
    near
        Neighbors of every cell, (N, 8).
    block
        Spatial block of every cell, (N,).
    """

    features: Array
    near: NDArray[np.intp]
    block: NDArray[np.intp]


def fit_components(values: Array) -> Callable[[Array], Array]:
    """Principal components of standardized expression (N, G), as a function of expression."""
    mean, sd = values.mean(0), values.std(0)
    sd[sd == 0] = 1.0
    standard = lambda x: np.clip((x - mean) / sd, -CLIP, CLIP)
    pca = PCA(min(N_COMPONENTS, *values.shape), svd_solver="covariance_eigh").fit(standard(values))
    return lambda x: pca.transform(standard(x))


def blocks(position: Array) -> NDArray[np.intp]:
    """Number of the block of every cell: quantiles along the first principal axis, within each along the second."""
    x = position - position.mean(0)
    axes = x @ np.linalg.svd(x, full_matrices=False)[2].T
    strip = _quantile(axes[:, 0])
    block = np.empty(len(x), dtype=np.intp)
    for i in range(CUTS):
        block[strip == i] = CUTS * i + _quantile(axes[strip == i, 1])
    return block


def _quantile(values: Array) -> NDArray[np.intp]:
    """Quantile bin of each value."""
    return np.argsort(np.argsort(values)) * CUTS // len(values)


def describe(components: Array, position: Array) -> Tissue:
    """Neighborhoods of a tissue from the components of its expression (N, K) and its positions (N, D)."""
    n, n_dims = position.shape
    near = nearest_neighbors(position, N_NEIGHBORS)
    distance = np.linalg.norm(position[near] - position[:, None], axis=2)
    spacing = np.sqrt(((position - position.mean(0)) ** 2).sum(1).mean()) / n ** (1 / n_dims)
    features = [components, components[near].mean(1), distance / spacing]
    return Tissue(np.hstack(features), near, blocks(position))


def paired_blocks(a: Tissue, b: Tissue) -> NDArray[np.intp]:
    """Block of every cell of both; blocks of ``b`` are matched with the most similar ones of ``a``."""
    half = (a.features.shape[1] - N_NEIGHBORS) // 2  # the components of the cell itself
    means = [np.stack([t.features[t.block == i, :half].mean(0) for i in range(CUTS**2)]) for t in (a, b)]
    of_a, of_b = linear_sum_assignment(cdist(*means))
    return np.concatenate([a.block, of_a[np.argsort(of_b)][b.block]])


def auc(a: Tissue, b: Tissue, n_cells: int, *, seed: int) -> float:
    """Area under the ROC curve for telling ``n_cells`` of one from as many of the other, mean over spatial folds."""
    rng = np.random.default_rng(seed)
    n_a = len(a.block)
    features, block = np.vstack([a.features, b.features]), paired_blocks(a, b)
    near = np.vstack([a.near, b.near + n_a])
    label = np.arange(len(block)) >= n_a
    used = np.zeros(len(block), dtype=bool)
    for rows in np.split(np.arange(len(block)), [n_a]):
        used[rng.choice(rows, n_cells, replace=False)] = True
    areas = []
    folds = StratifiedGroupKFold(N_FOLDS, shuffle=True, random_state=seed)
    for _, rows in folds.split(features, label, block):
        test = np.zeros(len(block), dtype=bool)
        test[rows] = True
        near_test = test | test[near].any(1)
        near_test[near[test]] = True
        train = used & ~near_test
        test &= used
        model = HistGradientBoostingClassifier(early_stopping=False, random_state=seed)
        model.fit(features[train], label[train])
        areas.append(roc_auc_score(label[test], model.predict_proba(features[test])[:, 1]))
    return float(np.mean(areas))


def own_moments(components: Array) -> Array:
    """Components of one tissue with mean 0 and variance 1 over its cells."""
    sd = components.std(0)
    return (components - components.mean(0)) / np.where(sd > 0, sd, 1.0)


MOMENTS: dict[str, Callable[[Array], Array]] = {"auc": own_moments, "auc_raw": lambda components: components}
"""Score -> transformation of the components of a tissue."""


def excess(entries: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, dict[str, list[float | None]]]:
    """Score -> row of the reference -> sample minus it, mean over folds, ``[mean, sd]`` over the finished seeds."""
    scores = {(e["method"], e["fold"], e["seed"]): e["scores"] for e in entries}
    folds = sorted({e["fold"] for e in entries})
    whole = [s for s in seeds if all((m, f, s) in scores for m in (SAMPLE, NEAREST, MEAN) for f in folds)]
    found: dict[str, dict[str, list[float | None]]] = {}
    for score in MOMENTS if whole else ():
        found[score] = {}
        for other in (NEAREST, MEAN):
            delta = [np.mean([scores[SAMPLE, f, s][score] - scores[other, f, s][score] for f in folds]) for s in whole]
            found[score][other] = [float(np.mean(delta)), float(np.std(delta, ddof=1)) if len(delta) > 1 else None]
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Score every unfinished fold and seed, and print the table."""
    options = _held_out.parse(_held_out.parser("joint"), argv)
    results, summary = _held_out.run_folds(run, options)
    found = excess(results.entries, options.seeds)
    results.write(summary=summary, excess=found)
    print(table(summary, tuple(MOMENTS)))
    for score, others in found.items():
        for other, value in others.items():
            print(f"{score}: {SAMPLE} - {other}: {mean_sd(*value, '+.3f')}")


def run(
    results: Results, name: str, reference: AnnData, held_out: AnnData, *, seed: int, options: argparse.Namespace
) -> None:
    """All comparisons of one fold."""
    training = _models.training_parameters(options.minutes, mode="any")
    if results.find(training, method=SAMPLE, fold=name, seed=seed):
        return
    model, train_seconds = _held_out.trained(reference, name, mode="any", seed=seed, options=options)
    start = time.perf_counter()
    drawn = [model.sample(mode="joint", n_cells=held_out.n_obs, random_state=DRAWS * seed + k) for k in range(DRAWS)]
    seconds = time.perf_counter() - start
    areas, each = compare(reference, held_out, drawn, model.schema.library_size, seed=seed)
    for method, scores in areas.items():
        if method == SAMPLE:
            fields = {"seconds": seconds, "train_seconds": round(train_seconds, 1), "model": _models.fingerprint(model)}
            _held_out.keep(results, method, name, seed, parameters=training, scores=scores, **fields)
        else:
            _held_out.keep(results, method, name, seed, parameters={}, scores=scores, slices=each)


def compare(
    reference: AnnData, held_out: AnnData, drawn: Sequence[AnnData], depth: float, *, seed: int
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Scores of every row, the samples last, and of every slice of the reference."""
    values = normalized(reference.X, depth)
    components = fit_components(values)
    slices = reference.obs["slice_id"].astype(str).to_numpy()
    names = np.unique(slices).tolist()
    position = np.asarray(reference.obsm["spatial"], dtype=np.float64)
    cells = {s: (components(values[slices == s]), position[slices == s]) for s in names}
    mixed = np.random.default_rng(seed).permutation(cells[names[0]][0])
    cells[SHUFFLED] = mixed, cells[names[0]][1]
    *samples, truth = (
        (components(normalized(a.X, depth)), np.asarray(a.obsm["spatial"], dtype=np.float64))
        for a in (*drawn, held_out)
    )
    draws = [f"{SAMPLE} {k}" for k in range(len(drawn))]
    cells |= dict(zip(draws, samples, strict=True))
    n_cells = min(len(x) for x, _ in (truth, *cells.values()))
    found = {
        row: {
            score: auc(describe(change(x), y), describe(change(truth[0]), truth[1]), n_cells, seed=seed)
            for score, change in MOMENTS.items()
        }
        for row, (x, y) in cells.items()
    }
    each = {s: found[s] for s in names}
    areas = {
        row: {score: float(pick([one[score] for one in each.values()])) for score in MOMENTS}
        for row, pick in ((NEAREST, min), (MEAN, np.mean))
    }
    areas |= {SHUFFLED: found[SHUFFLED]}
    return areas | {SAMPLE: {score: float(np.mean([found[k][score] for k in draws])) for score in MOMENTS}}, each


if __name__ == "__main__":
    main()
