r"""Imputation of hidden genes of cells with known positions, compared with nearest neighbors in space and in expression.

The held-out slice is registered to the reference by the rigid map of ``pos_to_expr.py`` (cell-type centroids of 5 % of its
cells). Two tasks: ``genes``, the same 30 % of the genes are hidden in every cell; ``entries``, a random 30 % of all
entries. The hidden values differ between seeds. Every method receives the rest of the held-out slice, its
registered positions, and the whole reference.

Values are log1p at the median library size of the reference. The library size of a cell is estimated from its measured
genes, as their counts over the share that they have of the counts of the reference.

- ``space``: mean over the k reference cells nearest to the registered position;
- ``expression``: mean over the k reference cells nearest in 50 principal components of the standardized genes of the
  reference. Those of a cell with hidden genes are their posterior mean under probabilistic principal components
  (Tipping & Bishop 1999, J. R. Stat. Soc. B 61:611). If the same genes are hidden in all cells, the reference cells
  are embedded without them as well;
- k is the best of 5, 10, 20, 50, 100, 200 and 400 on the reference alone, where each slice is completed
  from the others with the same share hidden; ``best k`` is the best k on the truth, an upper limit for this choice;
- ``cell type``: mean of the reference cells of the same type. The type of the held-out cell is its true label, which
  no other method receives, and which was determined with the hidden genes;
- ``cell type, predicted``: the same with the types that a logistic regression, on those principal components, predicts
  from the genes that are not hidden: the means of all types, weighted with their probabilities;
- ``any``: mean of 16 samples, ``model.sample(query, mode="pos_to_expr", inpaint=True)``.

Scores of the hidden entries, in the 95 % of the cells that were not used for registration: ``pearson``, mean over
the genes of the correlation over cells; ``pearson_spatial``, the same over the fifth of these genes with the highest
Moran's I in the truth; ``mse``, mean squared error over mean variance. The output also has the ratio of AlphaSTomics to every other
row. Run as ``python -m benchmarks.gene_inpainting --benchmark starmap_mpfc``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.spatial import KDTree
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks import _held_out, _models
from benchmarks._report import markdown, table
from benchmarks.baselines._features import CLIP, nearest
from benchmarks.pos_to_expr import (
    dense,
    gene_correlation,
    make_task,
    mean_expression,
    morans_i,
    neighbor_mean,
    normalized,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from benchmarks._report import Results
    from benchmarks.pos_to_expr import Task

    Array = NDArray[np.float64]

HIDDEN_SHARE = 0.3
NEIGHBORS = (5, 10, 20, 50, 100, 200, 400)
N_COMPONENTS = 50
SPATIAL_SHARE = 0.2
QUESTIONS = ("genes", "entries")
BASELINES = ("space", "expression")
MODEL = "any"
SCORES = ("pearson", "pearson_spatial", "mse")


class Cells(NamedTuple):
    """Counts (N, G) and positions (N, D), in the frame of the first reference slice, of some cells."""

    counts: Array
    position: Array

    def at(self, rows: NDArray[np.bool_]) -> Cells:
        """A subset of the cells."""
        return Cells(self.counts[rows], self.position[rows])


def hide(shape: tuple[int, int], question: str, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which entries (N, G) are hidden."""
    if question == "genes":
        hidden = np.zeros(shape, dtype=bool)
        hidden[:, rng.choice(shape[1], round(HIDDEN_SHARE * shape[1]), replace=False)] = True
        return hidden
    flat = np.zeros(shape[0] * shape[1], dtype=bool)
    flat[rng.choice(flat.size, round(HIDDEN_SHARE * flat.size), replace=False)] = True
    return flat.reshape(shape)


def at_depth(counts: Array, known: NDArray[np.bool_], share: Array, depth: float) -> Array:
    """log1p at library size ``depth`` of the known entries, 0 elsewhere; ``share`` (G,) of the counts is each gene's."""
    seen = np.where(known, counts, 0.0)
    size, part = seen.sum(1), known @ share
    return np.log1p(seen * np.divide(depth * part, size, out=np.zeros(len(size)), where=size > 0)[:, None])


class Components:
    """Principal components of cells with unknown entries."""

    def __init__(self, values: Array) -> None:
        self.mean, self.sd = values.mean(0), values.std(0)
        self.sd[self.sd == 0] = 1.0
        pca = PCA(min(N_COMPONENTS, min(values.shape) - 1), svd_solver="covariance_eigh").fit(self._standard(values))
        self.noise = max(float(pca.noise_variance_), 1e-6)
        self.scale = np.sqrt(np.maximum(pca.explained_variance_ - self.noise, 0.0))
        self.loadings = pca.components_.T * self.scale

    def _standard(self, values: Array) -> Array:
        return np.clip((values - self.mean) / self.sd, -CLIP, CLIP)

    def __call__(self, values: Array, known: NDArray[np.bool_]) -> Array:
        """Posterior mean of the scores (N, K); ``known`` is (N, G), or (1, G) where it is the same for all cells."""
        w, n_genes = self.loadings, len(self.mean)
        outer = (w[:, :, None] * w[:, None, :]).reshape(n_genes, -1)
        precision = (known @ outer).reshape(len(known), w.shape[1], -1) + self.noise * np.eye(w.shape[1])
        seen = np.where(known, self._standard(values), 0.0) @ w
        return np.linalg.solve(precision, seen[..., None])[..., 0] * self.scale


def embed(reference: Cells, query: Cells, hidden: NDArray[np.bool_], depth: float) -> tuple[Array, Array]:
    """Principal components of reference and query without the hidden entries."""
    share = reference.counts.sum(0) / reference.counts.sum()
    everywhere = np.ones((1, len(share)), dtype=bool)
    components = Components(at_depth(reference.counts, everywhere, share, depth))
    alike = ~hidden.all(0, keepdims=True)  # without the genes that no query cell has
    of_reference = components(at_depth(reference.counts, alike, share, depth), alike)
    return of_reference, components(at_depth(query.counts, ~hidden, share, depth), ~hidden)


def neighbors(reference: Cells, query: Cells, hidden: NDArray[np.bool_], depth: float) -> dict[str, NDArray[np.intp]]:
    """Reference cells nearest to every query cell in space and in expression, (N, largest k), nearest first."""
    k = min(NEIGHBORS[-1], len(reference.counts))
    return {
        "space": KDTree(reference.position).query(query.position, k)[1].reshape(len(query.counts), k),
        "expression": nearest(*embed(reference, query, hidden, depth), n_neighbors=k),
    }


def best_k(near: NDArray[np.intp], values: Array, true: Array, scored: NDArray[np.bool_]) -> dict[int, float]:
    """Mean correlation of the hidden entries for every k."""
    genes = scored.any(0)
    return {
        k: float(gene_correlation(neighbor_mean(values, near[:, :k]), true, scored)[genes].mean())
        for k in NEIGHBORS
        if k <= near.shape[1]
    }


def choose_k(
    reference: Cells, slices: NDArray[np.str_], question: str, hidden: NDArray[np.bool_], depth: float, *, seed: int
) -> dict[str, int]:
    """The best k on the reference alone: each of its slices completed from the others."""
    rng, found = np.random.default_rng([seed, 1]), []
    for name in np.unique(slices):
        rest, here = reference.at(slices != name), reference.at(slices == name)
        # The same genes where these are the question, new entries where those are.
        mask = (
            np.broadcast_to(hidden[0], here.counts.shape)
            if question == "genes"
            else hide(here.counts.shape, question, rng)
        )
        near = neighbors(rest, here, mask, depth)
        values, true = normalized(rest.counts, depth), normalized(here.counts, depth)
        found.append({way: best_k(near[way], values, true, mask) for way in BASELINES})
    shared = [k for k in NEIGHBORS if all(k in scores["space"] for scores in found)]
    return {way: max(shared, key=lambda k: sum(scores[way][k] for scores in found)) for way in BASELINES}


def type_means(values: Array, labels: NDArray[np.str_], query_labels: NDArray[np.str_]) -> Array:
    """Mean of ``values`` (M, G) over the cells of each label; over all cells for a label without cells."""
    means = {label: values[labels == label].mean(0) for label in np.unique(labels)}
    return np.stack([means.get(label, values.mean(0)) for label in query_labels])


def predicted_type_means(values: Array, labels: NDArray[np.str_], of_reference: Array, of_query: Array) -> Array:
    """Mean of ``values`` (M, G) weighted by the predicted cell type probabilities."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000)).fit(of_reference, labels)
    return model.predict_proba(of_query) @ np.stack([values[labels == label].mean(0) for label in model.classes_])


def score(predicted: Array, true: Array, scored: NDArray[np.bool_], moran: Array) -> dict[str, float]:
    """Scores of the hidden entries (N, G); ``moran`` (G,) is Moran's I of the truth."""
    genes = np.flatnonzero(scored.any(0))
    spatial = genes[np.argsort(-moran[genes])[: max(1, round(SPATIAL_SHARE * len(genes)))]]
    correlation = gene_correlation(predicted, true, scored)
    n = scored[:, genes].sum(0)
    centered = np.where(scored, true - np.where(scored, true, 0.0).sum(0) / np.maximum(scored.sum(0), 1), 0.0)[:, genes]
    error = np.where(scored, predicted - true, 0.0)[:, genes]
    return {
        "pearson": float(correlation[genes].mean()),
        "pearson_spatial": float(correlation[spatial].mean()),
        "mse": float(((error**2).sum(0) / n).mean() / ((centered**2).sum(0) / n).mean()),
    }


def baselines(
    task: Task, hidden: NDArray[np.bool_], question: str, depth: float, *, seed: int
) -> dict[str, tuple[Array, dict[str, Any]]]:
    """Predictions (N, G) of the baselines, each with its k."""
    reference = Cells(dense(task.reference.X), task.places)
    query = Cells(dense(task.query.X), np.asarray(task.query.obsm["spatial"]))
    values, true = normalized(reference.counts, depth), normalized(query.counts, depth)
    scored = scored_entries(task, hidden)
    slices = task.reference.obs["slice_id"].astype(str).to_numpy()
    chosen = choose_k(reference, slices, question, hidden, depth, seed=seed)
    near = neighbors(reference, query, hidden, depth)
    found: dict[str, tuple[Array, dict[str, Any]]] = {}
    for way in BASELINES:
        on_truth = best_k(near[way], values, true, scored)
        for name, k in ((way, chosen[way]), (f"{way}, best k", max(on_truth, key=on_truth.__getitem__))):
            found[name] = neighbor_mean(values, near[way][:, :k]), {"k": k}
    labels, query_labels = (a.obs["cell_type"].astype(str).to_numpy() for a in (task.reference, task.query))
    found["cell type"] = type_means(values, labels, query_labels), {}
    embedded = embed(reference, query, hidden, depth)
    found["cell type, predicted"] = predicted_type_means(values, labels, *embedded), {}
    return found


def scored_entries(task: Task, hidden: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Hidden entries of the cells that did not register the slice."""
    scored = hidden.copy()
    scored[task.known] = False
    return scored


def ratios(summary: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Question -> other row -> score -> mean of the model over that of the row."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for question in QUESTIONS:
        model = summary.get(f"{question}, {MODEL}")
        others = [m for m in summary if m.startswith(f"{question}, ") and m != f"{question}, {MODEL}"]
        if model is not None:
            found[question] = {
                m.removeprefix(f"{question}, "): {s: model[s][0] / summary[m][s][0] for s in SCORES} for m in others
            }
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Train and score every unfinished fold and seed, and print the tables."""
    options = _held_out.parse(_held_out.parser("gene_inpainting"), argv)
    results, summary = _held_out.run_folds(run, options)
    found = ratios(summary)
    results.write(summary=summary, ratios=found)
    print(table(summary, SCORES))
    lines = [["AlphaSTomics over", *SCORES]]
    for question, others in found.items():
        lines += [[f"{question}, {name}", *(f"{line[s]:.2f}" for s in SCORES)] for name, line in others.items()]
    print("\n" + markdown(lines))


def run(
    results: Results, name: str, reference: AnnData, held_out: AnnData, *, seed: int, options: argparse.Namespace
) -> None:
    """Both tasks of one fold."""
    training = _models.training_parameters(options.minutes, mode="any")
    left = [q for q in QUESTIONS if not results.find(training, method=f"{q}, {MODEL}", fold=name, seed=seed)]
    if not left:
        return
    task = make_task(reference, held_out, seed=seed)
    model, train_seconds = _held_out.trained(reference, name, mode="any", seed=seed, options=options)
    depth = model.schema.library_size
    true = normalized(task.query.X, depth)
    moran = morans_i(true, task.query.obsm["spatial"])
    for question in left:
        hidden = hide(true.shape, question, np.random.default_rng(seed))
        scored = scored_entries(task, hidden)
        for method, (values, used) in baselines(task, hidden, question, depth, seed=seed).items():
            scores = score(values, true, scored, moran)
            _held_out.keep(results, f"{question}, {method}", name, seed, parameters={}, scores=scores, **used)
        start = time.perf_counter()
        known = np.where(hidden, np.nan, dense(task.query.X))
        drawn = mean_expression(model, task.query, known, depth, seed=seed)
        _held_out.keep(
            results, f"{question}, {MODEL}", name, seed, parameters=training, scores=score(drawn, true, scored, moran),
            seconds=time.perf_counter() - start, train_seconds=round(train_seconds, 1),
            model=_models.fingerprint(model),
        )  # fmt: skip


if __name__ == "__main__":
    main()
