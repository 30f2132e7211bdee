"""Effect of the number of steps on samples of one trained model and one query.

Every number of steps is scored with the same seeds, so that the differences are paired: 25 and 10 steps against 500,
and samples against the conditional mean (one step). Run as ``python -m benchmarks.sampler``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import _models, _placement
from benchmarks._data import BENCHMARKS, DEFAULT_MINUTES, find_data
from benchmarks._report import Results, mean_sd, summarize, table
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks._data import Fold

STEPS = (1, 10, 25, 500)
SAMPLERS = ("ddpm", "ddim", "dpm++2m")
COMPARISONS = ((25, 500), (10, 500), (500, 1), (25, 1), (10, 1))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampler", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--benchmark", choices=BENCHMARKS, default="seqfish", help="benchmark whose first fold is used")
    parser.add_argument("--steps", nargs="+", type=int, default=list(STEPS))
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=["dpm++2m"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="seeds of the samples")
    parser.add_argument("--model-seed", type=int, default=0, help="seed of the training")
    parser.add_argument("--minutes", type=float, help="training time; the default depends on the benchmark")
    parser.add_argument("--model-dir", type=Path, help="folder in which trained models are saved and reused")
    parser.add_argument("--output", type=Path, default=RESULTS / "sampler.json")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    options = parser.parse_args(argv)
    options.minutes = options.minutes or DEFAULT_MINUTES[options.benchmark]
    return options


def row(sampler: str, n_steps: int) -> str:
    """Name of a row of the table."""
    return f"{sampler}, {n_steps} step{'s' if n_steps > 1 else ''}"


def differences(
    entries: Sequence[Mapping[str, Any]], samplers: Sequence[str], seeds: Sequence[int]
) -> list[dict[str, Any]]:
    """Paired differences of every score between numbers of steps, ``[mean, sd]`` over the seeds that have both."""
    scores = {(e["method"], e["seed"]): e["scores"] for e in entries}
    found = []
    for sampler in samplers:
        for fewer, more in COMPARISONS:
            pairs = [(scores.get((row(sampler, fewer), s)), scores.get((row(sampler, more), s))) for s in seeds]
            both = [(a, b) for a, b in pairs if a is not None and b is not None]
            if both:
                line: dict[str, Any] = {"method": f"{row(sampler, fewer)} - {row(sampler, more)}", "n_seeds": len(both)}
                for metric in _placement.METRICS:
                    delta = [a[metric] - b[metric] for a, b in both]
                    line[metric] = [float(np.mean(delta)), float(np.std(delta, ddof=1)) if len(delta) > 1 else None]
                found.append(line)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Score one model with every number of steps and print the differences."""
    options = parse(argv)
    run(BENCHMARKS[options.benchmark](find_data(options.data_dir))[0], options)


def run(fold: Fold, options: argparse.Namespace) -> None:
    """Score one fold."""
    results = Results(options.output, {"benchmark": "sampler", "tissue": options.benchmark})
    path = _models.model_path(
        options.model_dir, options.benchmark, fold.name, mode=_models.MODE, seed=options.model_seed
    )
    model, train_seconds = _models.obtain_model(fold, seed=options.model_seed, minutes=options.minutes, path=path)
    training = _models.training_parameters(options.minutes) | {"model_seed": options.model_seed}
    name, methods = _models.fingerprint(model), []
    for sampler in options.samplers:
        for n_steps in options.steps:
            methods.append(row(sampler, n_steps))
            parameters = training | {"tissue": options.benchmark, "sampler": sampler, "n_steps": n_steps}
            for seed in options.seeds:
                entry = results.find(parameters, method=methods[-1], fold=fold.name, seed=seed)
                if entry is not None and entry["model"] == name:
                    continue
                start = time.perf_counter()
                placed = _models.sample(model, fold.query, seed=seed, sampler=sampler, n_steps=n_steps)
                seconds = round(time.perf_counter() - start, 2)
                scores = _placement.score(fold.truth, fold.in_source_order(placed))
                results.add(
                    method=methods[-1], fold=fold.name, seed=seed, parameters=parameters, scores=scores,
                    seconds=seconds, model=name, train_seconds=round(train_seconds, 1),
                )  # fmt: skip
    current = [entry for entry in results.entries if entry["model"] == name]
    summary = summarize(current, methods, [fold.name], options.seeds)
    paired = differences(current, options.samplers, options.seeds)
    results.write(summary=summary, differences=paired)
    print(f"\n{options.benchmark}, one model, mean ± sd over seeds of the draws")
    print(table(summary, _placement.METRICS))
    print("\npaired differences")
    for line in paired:
        print(line["method"] + ": " + ", ".join(f"{m} {mean_sd(*line[m], '+.4f')}" for m in _placement.METRICS))


if __name__ == "__main__":
    main()
