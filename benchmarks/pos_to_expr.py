r"""Expression written into the places of a held-out slice, beside the best guesses that need no model.

A rigid map, fitted on the cell-type centroids of 5 % of the cells, brings the held-out slice into the frame of the first
reference slice; reference slices are brought there by the centroids of all their cells. Two questions: (a) nothing more is
known; (b) the expression of those 5 % is known and held. Judged are the other 95 % of the cells, on the fifth of the genes
with the highest Moran's I in the truth, as log1p at the median library size of the reference:

- ``pearson``: mean over genes of the correlation over cells; ``mse``: mean squared error over mean variance;
- ``moran``: correlation, over all genes, of Moran's I with that of the truth; ``variance``: median over all genes of the
  variance over that of the truth. Both are of interest for a single sample.

Run as ``python -m benchmarks.pos_to_expr --benchmark starmap_mpfc``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.spatial import KDTree

from benchmarks import _ours
from benchmarks._data import DEFAULT_MINUTES, find_data, labelled_folds
from benchmarks._report import Results, summarise, table
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics

KNOWN_SHARE = 0.05
REFERENCE_NEIGHBOURS = 200
KNOWN_NEIGHBOURS = 5
MORAN_NEIGHBOURS = 8
SCORES = ("pearson", "mse", "moran", "variance")
SAMPLES = 16


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
    """Rigid map that brings the centroids of the labels in ``x`` onto those in ``y``, weighted by cells in ``x``."""
    shared = np.intersect1d(x_labels, y_labels)
    a = np.stack([x[x_labels == label].mean(0) for label in shared])
    b = np.stack([y[y_labels == label].mean(0) for label in shared])
    w = np.array([(x_labels == label).sum() for label in shared], dtype=np.float64)[:, None]
    a_0, b_0 = (w * a).sum(0) / w.sum(), (w * b).sum(0) / w.sum()
    u, _, vh = np.linalg.svd(((a - a_0) * w).T @ (b - b_0))
    return lambda points: (points - a_0) @ (u @ vh) + b_0


def make_task(reference: AnnData, held_out: AnnData, *, seed: int) -> Task:
    """Register everything to the first reference slice."""
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


def normalised(values: Any, depth: float) -> NDArray[np.float64]:
    """log1p at library size ``depth``."""
    dense = (values.toarray() if sp.issparse(values) else np.asarray(values)).astype(np.float64)
    size = dense.sum(1, keepdims=True)
    return np.log1p(dense * np.divide(depth, size, out=np.zeros_like(size), where=size > 0))


def morans_i(x: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Moran's I of every gene over the nearest neighbours."""
    near = KDTree(position).query(position, MORAN_NEIGHBOURS + 1)[1][:, 1:]
    z = x - x.mean(0)
    return (z * z[near].mean(1)).sum(0) / np.maximum((z**2).sum(0), 1e-12)


def judge(predicted: NDArray[np.float64], true: NDArray[np.float64], task: Task) -> dict[str, float]:
    """Scores of a prediction; see the head of this file."""
    position = task.query.obsm["spatial"]
    moran = morans_i(true, position)
    top = np.argsort(-moran)[: max(1, round(0.2 * len(moran)))]
    asked = np.setdiff1d(np.arange(len(true)), task.known)
    p, t = predicted[asked], true[asked]
    z_p, z_t = p - p.mean(0), t - t.mean(0)
    norm = np.sqrt((z_p**2).sum(0) * (z_t**2).sum(0))
    correlation = np.divide((z_p * z_t).sum(0), norm, out=np.zeros(len(norm)), where=norm > 0)
    varies = t.var(0) > 0
    return {
        "pearson": float(correlation[top].mean()),
        "mse": float(((p - t)[:, top] ** 2).mean() / t[:, top].var(0).mean()),
        "moran": float(np.corrcoef(morans_i(predicted, position), moran)[0, 1]),
        "variance": float(np.median(p.var(0)[varies] / t.var(0)[varies])),
    }


def baselines(task: Task, depth: float) -> dict[str, NDArray[np.float64]]:
    """Label-free guesses: neighbours in the reference, neighbours among the known cells, and the mean of both."""
    x = task.query.obsm["spatial"]
    near = KDTree(task.places).query(x, REFERENCE_NEIGHBOURS)[1]
    of_reference = normalised(task.reference.X, depth)[near].mean(1)
    of_known = normalised(task.query.X, depth)[task.known]
    close = KDTree(x[task.known]).query(x, KNOWN_NEIGHBOURS)[1]
    interpolated = of_known[close].mean(1)
    return {
        "reference neighbours": of_reference,
        "known neighbours": interpolated,
        "both neighbours": (of_reference + interpolated) / 2,
    }


def ours(model: AlphaSTomics, task: Task, depth: float, *, inpaint: bool, seed: int) -> dict[str, NDArray[np.float64]]:
    """The mean of the samples, and one of them."""
    query = task.query.copy()
    if inpaint:
        values = query.X.toarray() if sp.issparse(query.X) else np.array(query.X)
        hidden = np.full(values.shape, np.nan, dtype=np.float32)
        hidden[task.known] = values[task.known]
        query.X = hidden
    else:
        query.X = None
    drawn = model.sample(query, mode="pos_to_expr", inpaint=inpaint, n_samples=SAMPLES, random_state=seed)
    draws = normalised(drawn.X, depth).reshape(SAMPLES, query.n_obs, -1)
    return {"mean": draws.mean(0), "sample": draws[0]}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pos_to_expr", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--benchmark", choices=("seqfish", "starmap_mpfc"), default="starmap_mpfc")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--mode", choices=("any", "pos_to_expr"), default="any", help="of the model")
    parser.add_argument("--minutes", type=float, help="training time; default that of the benchmark")
    parser.add_argument("--model-dir", type=Path, help="keep trained models here and use those that are there")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/pos_to_expr_BENCHMARK.json")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    options = parser.parse_args(argv)
    options.minutes = options.minutes or DEFAULT_MINUTES[options.benchmark]
    options.output = options.output or RESULTS / f"pos_to_expr_{options.benchmark}.json"
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Train and judge every fold and seed that is not finished, and print the table."""
    options = parse(argv)
    folds = labelled_folds(options.benchmark, find_data(options.data_dir))
    results = Results(options.output, {"benchmark": "pos_to_expr", "tissue": options.benchmark})
    for seed in options.seeds:
        for name, (reference, held_out) in folds.items():
            run(results, name, make_task(reference, held_out, seed=seed), seed=seed, options=options)
    methods = list(dict.fromkeys(entry["method"] for entry in results.entries))
    summary = summarise(results.entries, methods, list(folds), options.seeds)
    results.write(summary=summary)
    print(table(summary, SCORES))


def run(results: Results, name: str, task: Task, *, seed: int, options: argparse.Namespace) -> None:
    """Judge the baselines and one model on one fold."""
    training = _ours.training_parameters(options.minutes, mode=options.mode)
    if results.find(training, method=f"{options.mode}, known, sample", fold=name, seed=seed):
        return
    path = (
        options.model_dir and options.model_dir / f"pos_to_expr_{options.benchmark}" / f"{name}_{options.mode}_{seed}"
    )
    model, seconds = _ours.train_or_load(
        task.reference, seed=seed, minutes=options.minutes, mode=options.mode, path=path
    )
    depth = model.schema.library_size
    true = normalised(task.query.X, depth)
    predictions = baselines(task, depth)
    start = time.perf_counter()
    for question, inpaint in (("registered", False), ("known", True)):
        drawn = ours(model, task, depth, inpaint=inpaint, seed=seed)
        predictions |= {f"{options.mode}, {question}, {kind}": values for kind, values in drawn.items()}
    for method, values in predictions.items():
        scores = judge(values, true, task)
        own = method.startswith(options.mode)
        results.add(
            method=method, fold=name, seed=seed, parameters=training if own else {}, scores=scores,
            seconds=round(time.perf_counter() - start, 1) if own else 0.0, train_seconds=round(seconds, 1),
        )  # fmt: skip
        print(f"{name}, seed {seed}, {method}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()), flush=True)


if __name__ == "__main__":
    main()
