"""Scores of placements after ½ to 15 minutes, by this version and by the commit of :mod:`benchmarks._earlier`, and of two baselines.

``tl.reconstruct`` with default settings and ``max_time``, in a process of its own with one thread; ``seconds`` are those of the whole process.
Both versions run at the same time on a core each, so that a slow machine slows both. The baselines have no limit of time. The first fold of
each tissue is placed.
``reached`` is the shortest time after which both thresholds of ``THRESHOLDS`` are exceeded, means over seeds; None: not within the times that were run.
Run as ``python -m benchmarks.time_to_accuracy`` on a machine of two cores on which nothing else runs; finished runs are kept.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks._data import BENCHMARKS, find_data
from benchmarks._earlier import COMMIT, EARLIER, OURS, checkout, place
from benchmarks._process import ROOT
from benchmarks._report import Results, markdown
from benchmarks._runner import RESULTS, run_plain, store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks._data import Fold

TISSUES = ("seqfish", "hypothalamus", "starmap_mpfc")
BASELINES = ("contrastive", "distance_mlp")
MINUTES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
THRESHOLDS = {"distance_spearman": 0.72, "knn_20": 0.145}  # of seqFISH


def reached(entries: Sequence[Mapping[str, Any]], tissue: str = "seqfish") -> dict[str, float | None]:
    """Method -> minutes after which all thresholds are exceeded, means over folds and seeds."""
    runs: dict[str, dict[float, list[Mapping[str, float]]]] = {method: {} for method in (OURS, EARLIER)}
    for entry in entries:
        if entry["method"] in runs and entry["fold"].startswith(f"{tissue}, "):
            runs[entry["method"]].setdefault(entry["parameters"]["minutes"], []).append(entry["scores"])
    exceeded = {
        method: [
            minutes
            for minutes, scores in found.items()
            if all(np.mean([each[name] for each in scores]) >= least for name, least in THRESHOLDS.items())
        ]
        for method, found in runs.items()
    }
    return {method: min(minutes, default=None) for method, minutes in exceeded.items()}


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Scores of all runs."""
    lines = [["fold", "method", "seconds", *THRESHOLDS, "contact_5"]]
    lines += [
        [e["fold"], e["method"], f"{e['seconds']:.0f}", *(f"{e['scores'][s]:.3f}" for s in (*THRESHOLDS, "contact_5"))]
        for e in sorted(entries, key=lambda e: (e["fold"], e["method"]))
    ]
    return markdown(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run unfinished placements, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_to_accuracy", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tissues", nargs="+", choices=TISSUES, default=list(TISSUES))
    parser.add_argument("--minutes", nargs="+", type=float, default=list(MINUTES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    parser.add_argument("--output", type=Path, default=RESULTS / "time_to_accuracy.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = Results(options.output, {"benchmark": "time_to_accuracy"})
    folder = find_data(options.data_dir)
    with tempfile.TemporaryDirectory() as earlier:
        sources = {OURS: ROOT / "src", EARLIER: checkout(COMMIT, Path(earlier))}
        for seed in options.seeds:
            for tissue in options.tissues:
                fold = BENCHMARKS[tissue](folder)[0]
                _run(results, replace(fold, name=f"{tissue}, {fold.name}"), seed, options.minutes, sources)
    results.write(reached=reached(results.entries))
    print(table(results.entries), flush=True)


def _run(results: Results, fold: Fold, seed: int, minutes: Sequence[float], sources: Mapping[str, Path]) -> None:
    """Run the unfinished placements of a fold."""
    for method in BASELINES:
        run_plain(results, fold, method, seed)
    for limit in minutes:
        named, parameters = replace(fold, name=f"{fold.name}, {limit:g} min"), {"minutes": limit}
        if any(results.find(parameters, method=method, fold=named.name, seed=seed) is None for method in sources):
            with ThreadPoolExecutor() as pool:
                placed = list(pool.map(partial(place, fold, seed=seed, minutes=limit), sources.values()))
            for method, (positions, seconds) in zip(sources, placed, strict=True):
                store(results, named, method, seed, parameters, positions, seconds)


if __name__ == "__main__":
    main()
