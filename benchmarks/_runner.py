"""Run a method on a fold unless that is finished, score the positions, and keep the scores."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import _models, _placement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from benchmarks._data import Fold
    from benchmarks._report import Results

RESULTS = Path(__file__).parent / "results"


def run_plain(results: Results, fold: Fold, method: str, seed: int) -> None:
    """Run a baseline, or chance: true positions permuted over all cells, unless it is finished."""
    from benchmarks.baselines import BASELINES, PARAMETERS

    parameters = PARAMETERS.get(method, {})
    if results.find(parameters, method=method, fold=fold.name, seed=seed) is not None:
        return
    if method == "chance":
        place = lambda: fold.truth[np.random.default_rng(seed).permutation(len(fold.truth))]
    else:
        place = lambda: fold.in_source_order(BASELINES[method](fold.reference.copy(), fold.query.copy(), seed=seed))
    _keep(results, fold, method, seed, parameters, place)


def run_variants(
    results: Results,
    folds: Sequence[Fold],
    methods: Sequence[str],
    seed: int,
    path: Path | None,
    **network: Any,
) -> None:
    """Run variants of one model on ``folds`` of one reference, unless all of them are finished."""
    parameters = _models.training_parameters(None, **network)
    runs = [(fold, method) for fold in folds for method in methods]
    done = [results.find(parameters, method=method, fold=fold.name, seed=seed) for fold, method in runs]
    if all(entry is not None for entry in done) and len({entry["model"] for entry in done if entry}) == 1:
        return
    print(f"{folds[0].name}, seed {seed}: training, or loading a saved model", flush=True)
    model, train_seconds = _models.obtain_model(folds[0], seed=seed, minutes=None, path=path, **network)
    fields = {"model": _models.fingerprint(model), "train_seconds": round(train_seconds, 1)}
    for (fold, method), entry in zip(runs, done, strict=True):
        # Variants are compared with each other, so all of them must be those of one model.
        if entry is None or entry["model"] != fields["model"]:
            place = lambda fold=fold, method=method: fold.in_source_order(
                _models.place(model, fold.query, method, seed=seed)
            )
            _keep(results, fold, method, seed, parameters, place, **fields)


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
