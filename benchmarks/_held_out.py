"""Options of the benchmarks that score a trained model on held-out slices, and their loop over slices with labels."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import _models
from benchmarks._data import find_data, labeled_folds
from benchmarks._report import Results, summarize
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from anndata import AnnData

    from alphastomics.model import AlphaSTomics

TISSUES = ("starmap_mpfc", "seqfish")
MINUTES = {"starmap_mpfc": 3.0, "drosophila3d": 4.0, "seqfish": 12.0, "hypothalamus": 12.0}  # of a training


def parser(name: str, *, tissue: str = TISSUES[0], tissues: Collection[str] = TISSUES) -> argparse.ArgumentParser:
    """Common options of these benchmarks; ``tissue`` is the default of ``--benchmark``, and ``tissues`` are its choices."""
    found = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    found.add_argument("--benchmark", choices=tissues, default=tissue, help="tissue")
    found.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    found.add_argument(
        "--minutes", type=float, help="training time of a model; 0: the package chooses; default by tissue"
    )
    found.add_argument("--model-dir", type=Path, help="folder in which trained models are saved and reused")
    found.add_argument("--output", type=Path, help=f"default benchmarks/results/{name}_BENCHMARK.json")
    found.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    found.set_defaults(name=name)
    return found


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the options and fill in the training time and the output, which depend on the tissue."""
    options = parser.parse_args(argv)
    minutes = MINUTES.get(options.benchmark) if options.minutes is None else options.minutes
    options.minutes = minutes or None
    options.output = options.output or RESULTS / f"{options.name}_{options.benchmark}.json"
    return options


def run_folds(run: Callable[..., None], options: argparse.Namespace) -> tuple[Results, dict[str, dict[str, Any]]]:
    """Call ``run(results, fold, reference, held_out, seed=, options=)`` for every seed and fold, and summarize."""
    folds = labeled_folds(options.benchmark, find_data(options.data_dir))
    results = Results(options.output, {"benchmark": options.name, "tissue": options.benchmark})
    for seed in options.seeds:
        for fold, (reference, held_out) in folds.items():
            run(results, fold, reference, held_out, seed=seed, options=options)
    methods = list(dict.fromkeys(entry["method"] for entry in results.entries))
    summary = summarize(results.entries, methods, list(folds), options.seeds)
    results.write(summary=summary)
    return results, summary


def trained(
    reference: AnnData, fold: str, *, mode: str, seed: int, options: argparse.Namespace
) -> tuple[AlphaSTomics, float]:
    """Model of this fold, mode and seed, loaded from ``--model-dir`` if saved there, and its training time in seconds."""
    path = _models.model_path(options.model_dir, options.benchmark, fold, mode=mode, seed=seed)
    return _models.train_or_load(reference, seed=seed, minutes=options.minutes, mode=mode, path=path)


def keep(
    results: Results,
    method: str,
    fold: str,
    seed: int,
    *,
    parameters: Mapping[str, Any],
    scores: Mapping[str, float],
    seconds: float = 0.0,
    **fields: Any,
) -> None:
    """Save and print the scores of a finished run."""
    results.add(
        method=method, fold=fold, seed=seed, parameters=parameters, scores=scores, seconds=round(seconds, 1), **fields
    )
    print(f"{fold}, seed {seed}, {method}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores.items()), flush=True)
