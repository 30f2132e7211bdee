"""Run methods x folds x seeds of one benchmark, keep finished runs, print the table."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import _models, _placement
from benchmarks._data import BENCHMARKS, DEFAULT_MINUTES, Fold, find_data
from benchmarks._report import Results, summarize, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

RESULTS = Path(__file__).parent / "results"
FLOOR_AND_CEILING = ("chance", "oracle")
BASELINE_NAMES = ("knn_25", "knn_30", "knn_30_unscaled", "contrastive", "distance_mlp", "optimal_transport")
METHODS = (*FLOOR_AND_CEILING, *BASELINE_NAMES, _models.DEFAULT, *_models.VARIANTS)


def main(benchmark: str, argv: Sequence[str] | None = None) -> None:
    """Run one benchmark from the command line."""
    options = parse(benchmark, argv)
    run(benchmark, BENCHMARKS[benchmark](find_data(options.data_dir)), options)


def parse(benchmark: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of a benchmark."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--minutes", type=float, default=DEFAULT_MINUTES[benchmark], help="training time of AlphaSTomics"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / f"{benchmark}.json")
    parser.add_argument("--model-dir", type=Path, help="folder in which trained models are saved and reused")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    return parser.parse_args(argv)


def run(benchmark: str, folds: Sequence[Fold], options: argparse.Namespace) -> None:
    """Run unfinished methods, fast ones first, and print the table."""
    header = {
        "benchmark": benchmark,
        "chance_knn_20": float(np.mean([_placement.chance_knn(len(fold.truth)) for fold in folds])),
    }
    results = Results(options.output, header)
    variants = [name for name in options.methods if name == _models.DEFAULT or name in _models.VARIANTS]
    for seed in options.seeds:
        for fold in folds:
            for method in options.methods:
                if method not in variants:
                    run_plain(results, fold, method, seed)
    for seed in options.seeds if variants else ():
        for fold in folds:
            path = _models.model_path(options.model_dir, benchmark, fold.name, mode=_models.MODE, seed=seed)
            run_variants(results, [fold], variants, seed, options.minutes, path)
    summary = summarize(results.entries, options.methods, [fold.name for fold in folds], options.seeds)
    results.write(summary=summary)
    print(f"\n{benchmark}: chance knn_20 {header['chance_knn_20']:.4f}, mean ± sd over seeds")
    print(table(summary, _placement.METRICS), flush=True)


def run_plain(results: Results, fold: Fold, method: str, seed: int) -> None:
    """Run a control or a baseline, unless it is finished."""
    if method == "oracle" and fold.labels is None:
        return
    from benchmarks.baselines import BASELINES, PARAMETERS

    parameters = PARAMETERS.get(method, {})
    if results.find(parameters, method=method, fold=fold.name, seed=seed) is not None:
        return
    if method in FLOOR_AND_CEILING:
        place = lambda: control(fold, method, seed=seed)
    else:
        place = lambda: fold.in_source_order(BASELINES[method](fold.reference.copy(), fold.query.copy(), seed=seed))
    _keep(results, fold, method, seed, parameters, place)


def run_variants(
    results: Results,
    folds: Sequence[Fold],
    methods: Sequence[str],
    seed: int,
    minutes: float | None,
    path: Path | None,
) -> None:
    """Run variants of one model on ``folds`` of one reference, unless all of them are finished."""
    training = _models.training_parameters(minutes)
    parameters = {method: training | _models.VARIANTS.get(method, {}) for method in methods}
    runs = [(fold, method) for fold in folds for method in methods]
    done = [results.find(parameters[method], method=method, fold=fold.name, seed=seed) for fold, method in runs]
    if all(entry is not None for entry in done) and len({entry["model"] for entry in done if entry}) == 1:
        return
    print(f"{folds[0].name}, seed {seed}: training, or loading a saved model", flush=True)
    model, train_seconds = _models.obtain_model(folds[0], seed=seed, minutes=minutes, path=path)
    fields = {"model": _models.fingerprint(model), "train_seconds": round(train_seconds, 1)}
    for (fold, method), entry in zip(runs, done, strict=True):
        # Variants are compared with each other, so all of them must be those of one model.
        if entry is None or entry["model"] != fields["model"]:
            place = lambda fold=fold, method=method: fold.in_source_order(
                _models.place(model, fold.query, method, seed=seed)
            )
            _keep(results, fold, method, seed, parameters[method], place, **fields)


def _keep(
    results: Results,
    fold: Fold,
    method: str,
    seed: int,
    parameters: dict[str, Any],
    place: Callable[[], NDArray[np.float64]],
    **fields: Any,
) -> None:
    start = time.perf_counter()
    predicted = place()
    store(results, fold, method, seed, parameters, predicted, round(time.perf_counter() - start, 2), **fields)


def store(
    results: Results,
    fold: Fold,
    method: str,
    seed: int,
    parameters: dict[str, Any],
    predicted: NDArray[np.float64],
    seconds: float,
    **fields: Any,
) -> None:
    """Score positions, ``(n_query, n_dims)`` in the order of ``fold.truth``, add them to the results, and print the scores."""
    scored = slice(None) if fold.scored is None else fold.scored
    scores = _placement.score(fold.truth[scored], predicted[scored])
    results.add(
        method=method, fold=fold.name, seed=seed, parameters=parameters, scores=scores, seconds=seconds, **fields
    )
    figures = ", ".join(f"{key} {value:.3f}" for key, value in scores.items())
    print(f"{fold.name}, seed {seed}, {method}: {figures} ({seconds:.0f} s)", flush=True)


def control(fold: Fold, method: str, *, seed: int) -> NDArray[np.float64]:
    """Chance and oracle: true positions permuted over all cells, or within each cell type."""
    rng = np.random.default_rng(seed)
    if method == "chance":
        return fold.truth[rng.permutation(len(fold.truth))]
    if fold.labels is None:
        raise ValueError(f"{fold.name} has no cell types, which the oracle needs")
    permuted = np.empty_like(fold.truth)
    for label in np.unique(fold.labels):
        rows = np.flatnonzero(fold.labels == label)
        permuted[rows] = fold.truth[rng.permutation(rows)]
    return permuted
