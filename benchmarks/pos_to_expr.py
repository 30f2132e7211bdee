r"""Prediction of expression at the positions of a held-out slice, compared with methods that need no model.

A rigid map, fitted on the cell-type centroids of 5 % of the cells, registers the held-out slice to the first
reference slice; the other reference slices are registered by the centroids of all their cells. Two tasks: (a) no expression is
observed; (b) the expression of those 5 % is observed. Scored are the other 95 % of the cells, on the fifth of the genes
with the highest Moran's I in the truth, as log1p at the median library size of the reference:

- ``pearson``: mean over genes of the correlation over cells; ``mse``: mean squared error over mean variance;
- ``moran``: correlation, over all genes, of Moran's I with that of the truth; ``variance``: median over all genes of the
  variance over that of the truth. Both are meant for single samples: rows ``sample`` have the mean of the scores of
  four samples.

Three rows are upper references. ``all other cells``: the mean of the nearest cells of the held-out slice itself, without the
cell, with the number of neighbors that is best for the slice; these are twenty times as many cells as the other methods
receive. ``true layers``, if layers were annotated: the mean of the nearest reference cells of the annotated layer of
each cell, in a slice registered by all of its cells. ``reference slices``: Moran's I of real tissue, the mean over the slices of the
reference of its correlation with that of the truth, and the correlation of their mean.

Run as ``python -m benchmarks.pos_to_expr --benchmark starmap_mpfc``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.spatial import KDTree

from benchmarks import _held_out, _models
from benchmarks._report import table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics
    from benchmarks._report import Results

KNOWN_SHARE = 0.05
REFERENCE_NEIGHBORS = 200
KNOWN_NEIGHBORS = 5
MORAN_NEIGHBORS = 8
OTHER_NEIGHBORS = (4, 8, 16, 32, 64, 128)
LAYER_NEIGHBORS = 100
SCORES = ("pearson", "mse", "moran", "variance")
SAMPLES = 16  # samples whose mean is scored
SINGLES = 4  # samples that are scored one by one


class Task(NamedTuple):
    """One held-out slice in the frame of the reference.

    Attributes
    ----------
    reference, query
        Cells; ``query.obsm["spatial"]`` is registered.
    places
        Positions of the reference cells in the frame of the first reference slice.
    known
        Numbers of the query's cells whose expression may be known.
    """

    reference: AnnData
    query: AnnData
    places: NDArray[np.float64]
    known: NDArray[np.intp]


def rigid_map(
    x: NDArray[np.float64], x_labels: NDArray[np.str_], y: NDArray[np.float64], y_labels: NDArray[np.str_]
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Rigid map of the centroids of the labels in ``x`` to those in ``y``, weighted by cells in ``x``."""
    shared = np.intersect1d(x_labels, y_labels)
    a = np.stack([x[x_labels == label].mean(0) for label in shared])
    b = np.stack([y[y_labels == label].mean(0) for label in shared])
    w = np.array([(x_labels == label).sum() for label in shared], dtype=np.float64)[:, None]
    a_0, b_0 = (w * a).sum(0) / w.sum(), (w * b).sum(0) / w.sum()
    u, _, vh = np.linalg.svd(((a - a_0) * w).T @ (b - b_0))
    return lambda points: (points - a_0) @ (u @ vh) + b_0


def make_task(reference: AnnData, held_out: AnnData, *, seed: int) -> Task:
    """Register all slices to the first reference slice."""
    slices = reference.obs["slice_id"].astype(str).to_numpy()
    position = np.asarray(reference.obsm["spatial"], dtype=np.float64)
    labels = reference.obs["cell_type"].astype(str).to_numpy()
    first = slices == np.unique(slices)[0]
    places = position.copy()
    for name in np.unique(slices)[1:]:
        here = slices == name
        places[here] = rigid_map(position[here], labels[here], position[first], labels[first])(position[here])
    query = held_out.copy()
    x = np.asarray(query.obsm["spatial"], dtype=np.float64)
    known = np.sort(np.random.default_rng(seed).choice(len(x), round(KNOWN_SHARE * len(x)), replace=False))
    query_labels = query.obs["cell_type"].astype(str).to_numpy()
    query.obsm["spatial"] = rigid_map(x[known], query_labels[known], position[first], labels[first])(x)
    return Task(reference, query, places, known)


def dense(values: Any) -> NDArray[np.float64]:
    """A matrix of expression, sparse or not, as an array."""
    return np.asarray(values.toarray() if sp.issparse(values) else values, dtype=np.float64)


def normalized(values: Any, depth: float) -> NDArray[np.float64]:
    """log1p at library size ``depth``."""
    counts = dense(values)
    size = counts.sum(-1, keepdims=True)
    return np.log1p(counts * np.divide(depth, size, out=np.zeros_like(size), where=size > 0))


def morans_i(x: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Moran's I of every gene over the nearest neighbors."""
    near = KDTree(position).query(position, MORAN_NEIGHBORS + 1)[1][:, 1:]
    z = x - x.mean(0)
    return (z * z[near].mean(1)).sum(0) / np.maximum((z**2).sum(0), 1e-12)


def gene_correlation(
    x: NDArray[np.float64], y: NDArray[np.float64], cells: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Correlation of every gene over the cells, or over those that ``cells`` (N, G) chooses for it; 0 without variance."""
    weight = np.ones(x.shape) if cells is None else cells.astype(np.float64)
    n = np.maximum(weight.sum(0), 1)
    z_x, z_y = (weight * (values - (weight * values).sum(0) / n) for values in (x, y))
    norm = np.sqrt((z_x**2).sum(0) * (z_y**2).sum(0))
    return np.divide((z_x * z_y).sum(0), norm, out=np.zeros(len(norm)), where=norm > 0)


def score(predicted: NDArray[np.float64], true: NDArray[np.float64], task: Task) -> dict[str, float]:
    """Scores of a prediction; see the docstring of this file."""
    position = task.query.obsm["spatial"]
    moran = morans_i(true, position)
    top = np.argsort(-moran)[: max(1, round(0.2 * len(moran)))]
    scored = np.setdiff1d(np.arange(len(true)), task.known)
    p, t = predicted[scored], true[scored]
    varies = t.var(0) > 0
    return {
        "pearson": float(gene_correlation(p, t)[top].mean()),
        "mse": float(((p - t)[:, top] ** 2).mean() / t[:, top].var(0).mean()),
        "moran": float(np.corrcoef(morans_i(predicted, position), moran)[0, 1]),
        "variance": float(np.median(p.var(0)[varies] / t.var(0)[varies])),
    }


def neighbor_mean(values: NDArray[np.float64], near: NDArray[np.intp]) -> NDArray[np.float64]:
    """Mean of ``values`` (M, G) over the rows ``near`` (N, k)."""
    n, k = near.shape
    rows = np.arange(0, n * k + 1, k)
    return sp.csr_array((np.full(n * k, 1 / k), near.ravel(), rows), shape=(n, len(values))) @ values


def baselines(task: Task, depth: float) -> dict[str, NDArray[np.float64]]:
    """Baselines without labels: neighbors in the reference, neighbors among known cells, and the mean of both."""
    x = task.query.obsm["spatial"]
    near = KDTree(task.places).query(x, REFERENCE_NEIGHBORS)[1]
    of_reference = neighbor_mean(normalized(task.reference.X, depth), near)
    of_known = normalized(task.query.X, depth)[task.known]
    close = KDTree(x[task.known]).query(x, KNOWN_NEIGHBORS)[1]
    interpolated = neighbor_mean(of_known, close)
    return {
        "reference neighbors": of_reference,
        "known neighbors": interpolated,
        "both neighbors": (of_reference + interpolated) / 2,
    }


def all_other_cells(task: Task, depth: float) -> tuple[dict[str, float], int]:
    """Scores of the mean of the nearest other cells of the slice, and their number, which has the highest correlation."""
    x, true = task.query.obsm["spatial"], normalized(task.query.X, depth)
    near = KDTree(x).query(x, OTHER_NEIGHBORS[-1] + 1)[1][:, 1:]
    found = {k: score(neighbor_mean(true, near[:, :k]), true, task) for k in OTHER_NEIGHBORS}
    best = max(found, key=lambda k: found[k]["pearson"])
    return found[best], best


def true_layers(task: Task, held_out: AnnData, depth: float) -> NDArray[np.float64] | None:
    """Mean (N, G) of the nearest reference cells of the true layer, registered by all cells; None without layers."""
    if "layer" not in held_out.obs or "layer" not in task.reference.obs:
        return None
    labels, known_labels = (of.obs["cell_type"].astype(str).to_numpy() for of in (held_out, task.reference))
    x = np.asarray(held_out.obsm["spatial"], dtype=np.float64)
    x = rigid_map(x, labels, task.places, known_labels)(x)
    layers, known_layers = (of.obs["layer"].astype(str).to_numpy() for of in (held_out, task.reference))
    values = normalized(task.reference.X, depth)
    guess = np.broadcast_to(values.mean(0), (len(x), values.shape[1])).copy()
    for layer in np.intersect1d(layers, known_layers):
        cells, reference = layers == layer, known_layers == layer
        near = KDTree(task.places[reference]).query(x[cells], min(LAYER_NEIGHBORS, reference.sum()))[1]
        guess[cells] = neighbor_mean(values[reference], near)
    return guess


def reference_slices(task: Task, depth: float) -> dict[str, float]:
    """Correlation of Moran's I in real slices of the reference with that of the truth."""
    true = morans_i(normalized(task.query.X, depth), task.query.obsm["spatial"])
    slices = task.reference.obs["slice_id"].astype(str).to_numpy()
    values = normalized(task.reference.X, depth)
    found = np.stack([morans_i(values[slices == s], task.places[slices == s]) for s in np.unique(slices)])
    return {
        "moran": float(np.mean([np.corrcoef(one, true)[0, 1] for one in found])),
        "moran_of_mean": float(np.corrcoef(found.mean(0), true)[0, 1]),
    }


def score_model(
    model: AlphaSTomics, task: Task, depth: float, *, inpaint: bool, seed: int
) -> dict[str, dict[str, float]]:
    """Scores of the mean of sixteen samples (``reduce="mean"``), and mean scores of single samples."""
    known = None
    if inpaint:
        known = np.full(task.query.shape, np.nan)
        known[task.known] = dense(task.query.X)[task.known]
    true = normalized(task.query.X, depth)
    draws = draw_expression(model, task.query, known, seed=seed, n_samples=SINGLES)
    singles = [score(normalized(draw, depth), true, task) for draw in draws]
    return {
        "mean": score(mean_expression(model, task.query, known, depth, seed=seed), true, task),
        "sample": {name: float(np.mean([scores[name] for scores in singles])) for name in SCORES},
    }


def row_parameters(training: dict[str, Any], kind: str) -> dict[str, Any]:
    """Settings that determine a row of :func:`score_model`."""
    return training | ({"singles": SINGLES} if kind == "sample" else {})


def draw_expression(
    model: AlphaSTomics, query: AnnData, known: NDArray[np.float64] | None, *, seed: int, n_samples: int = SAMPLES
) -> NDArray[np.float64]:
    """Draws (K, N, G) of the query's expression, in its units, given its positions and ``known``, NaN where unknown."""
    drawn = _sample(model, query, known, n_samples=n_samples, random_state=seed)
    return dense(drawn.X).reshape(n_samples, query.n_obs, -1)


def mean_expression(
    model: AlphaSTomics, query: AnnData, known: NDArray[np.float64] | None, depth: float, *, seed: int
) -> NDArray[np.float64]:
    """Mean of the samples (N, G) as log1p at library size ``depth``; the mean is taken on that scale.

    It is that of the views of the samples and takes no steps (``reduce="mean"``); steps would only draw ``layers["sd"]``.
    """
    drawn = _sample(model, query, known, n_samples=SAMPLES, reduce="mean", n_steps=1, random_state=seed)
    return np.log1p(dense(drawn.X) * (depth / drawn.obs["library_size"].to_numpy())[:, None])


def _sample(model: AlphaSTomics, query: AnnData, known: NDArray[np.float64] | None, **arguments: Any) -> AnnData:
    query = query.copy()
    query.X = None if known is None else known.astype(np.float32)
    return model.sample(query, mode="pos_to_expr", inpaint=known is not None, **arguments)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _held_out.parser("pos_to_expr")
    parser.add_argument("--mode", choices=("any", "pos_to_expr"), default="any", help="mode of the model")
    return _held_out.parse(parser, argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train and score every unfinished fold and seed, and print the table."""
    _, summary = _held_out.run_folds(run, parse(argv))
    print(table(summary, SCORES))


def run(
    results: Results, name: str, reference: AnnData, held_out: AnnData, *, seed: int, options: argparse.Namespace
) -> None:
    """Score the baselines and one model on one fold."""
    training = _models.training_parameters(options.minutes, mode=options.mode)
    if results.find(row_parameters(training, "sample"), method=f"{options.mode}, known, sample", fold=name, seed=seed):
        return
    task = make_task(reference, held_out, seed=seed)
    model, seconds = _held_out.trained(reference, name, mode=options.mode, seed=seed, options=options)
    depth = model.schema.library_size
    true = normalized(task.query.X, depth)
    for method, values in baselines(task, depth).items():
        _held_out.keep(results, method, name, seed, parameters={}, scores=score(values, true, task))
    scores, k = all_other_cells(task, depth)
    _held_out.keep(results, "all other cells", name, seed, parameters={}, scores=scores, k=k)
    layered = true_layers(task, held_out, depth)
    if layered is not None:
        _held_out.keep(results, "true layers", name, seed, parameters={}, scores=score(layered, true, task))
    _held_out.keep(results, "reference slices", name, seed, parameters={}, scores=reference_slices(task, depth))
    for question, inpaint in (("registered", False), ("known", True)):
        start = time.perf_counter()
        for kind, scores in score_model(model, task, depth, inpaint=inpaint, seed=seed).items():
            _held_out.keep(
                results, f"{options.mode}, {question}, {kind}", name, seed, parameters=row_parameters(training, kind),
                scores=scores, seconds=time.perf_counter() - start, train_seconds=round(seconds, 1),
                model=_models.fingerprint(model),
            )  # fmt: skip


if __name__ == "__main__":
    main()
