"""Effect of each component for long contexts on accuracy, time and memory, with whole slices as contexts.

Models have the mode ``any``: attention and pair features use distances only in contexts with positions, which models of the mode
``expr_to_pos`` do not have. Every variant trains for the same number of steps in its own process. The placement and the conditional
mean of the held-out cells are scored. Contexts are short (``--shortest``) for most of the steps (``--warmup``) and then grow to whole
slices; rows named "contexts of …" keep contexts of one size. Beside the scores, the table has the median processor time of the last
steps, which does not depend on other programs, and the peak memory of the process.

With ``--minutes`` the time ends the training, and ``--steps`` only determines when contexts grow. Run as
``python -m benchmarks.ingredients --benchmark seqfish``; finished variants are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import _models, _placement
from benchmarks._data import BENCHMARKS, find_data
from benchmarks._process import in_fresh_process, peak_bytes
from benchmarks._report import Results, summarize, table
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

SHORT = 1024
GROWTH, WHOLE = 0.8, 0.2  # fractions of the steps after the warmup: growth, whole slices
PAIRS = {"pair_features": "factorized"}
VARIANTS: dict[str, dict[str, Any]] = {  # arguments of the model and, for contexts that do not grow, their size
    "contexts of 512": {"context_size": 512},
    "contexts of 1,024": {"context_size": SHORT},
    "full": {},
    "linear": {"attention": "linear"},
    "axial": {"attention": "axial"},
    "geometric": {"attention": "geometric"},
    "geometric, pairs": {"attention": "geometric", **PAIRS},
    "neighbor": {"attention": "neighbor"},
    "neighbor, pairs": {"attention": "neighbor", **PAIRS},
    "hyper": {"residual": "hyper"},
    "universal": {"layer_sharing": "universal"},
    "bottleneck": {"bottleneck": 4},
}
COSTS = ("n_steps", "step", "peak")


def lengths(options: argparse.Namespace, length: int | None) -> dict[str, Any]:
    """Arguments of training for contexts of one length, or, without one, for contexts that grow to whole slices."""
    if length is not None:
        return {"context_size": length}
    growing = {
        "context_growth": "geometric",
        "shortest_context": options.shortest,
        "growth_warmup": round(options.warmup * options.steps),
        "growth_steps": round(GROWTH * (1 - options.warmup) * options.steps),
    }
    return {"context_size": "auto", **growing}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train one variant and score the placement and the conditional mean."""
    import lightning.pytorch as pl
    import torch

    import alphastomics as asx

    class Clock(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.process_time())

    ends: list[float] = []
    (fold, *_) = BENCHMARKS[options.benchmark](find_data(options.data_dir))
    reference, arguments = fold.reference.copy(), dict(VARIANTS[options.variant])
    length = arguments.pop("context_size", None)
    asx.model.AlphaSTomics.setup_anndata(reference, position_key="spatial", slice_key="slice_id")
    model = asx.model.AlphaSTomics(reference, mode=_models.MODE, random_state=options.seed, **arguments)
    start = time.perf_counter()
    model.train(
        **lengths(options, length),
        **({"max_time": 60 * options.minutes} if options.minutes else {"max_steps": options.steps, "max_epochs": -1}),
        batch_size=SHORT,
        callbacks=[Clock()],
        enable_progress_bar=False,
    )
    seconds = time.perf_counter() - start
    training = peak_bytes()
    scores = {}
    for name, read_out in _models.READ_OUT.items():
        predicted = fold.in_source_order(_models.sample(model, fold.query, seed=options.seed, **read_out))
        scores[name] = _placement.score(fold.truth, predicted)
    taken = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    whole = max(1, round(WHOLE * (1 - options.warmup) * len(taken)))
    costs = {
        "n_steps": len(ends),
        "step": statistics.median(taken[-whole:]),
        "peak": training / 2**30,
        "threads": torch.get_num_threads(),
    }
    return {"scores": {name: found | costs for name, found in scores.items()}, "seconds": seconds}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ingredients", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--benchmark", choices=BENCHMARKS, default="seqfish")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of every variant")
    parser.add_argument("--shortest", type=int, default=SHORT, help="cells in the first contexts")
    parser.add_argument("--warmup", type=float, default=0.9, help="fraction of the steps with these contexts")
    parser.add_argument("--minutes", type=float, help="training time, instead of --steps")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/ingredients_BENCHMARK.json")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.output = options.output or RESULTS / f"ingredients_{options.benchmark}.json"
    return options


def run(results: Results, options: argparse.Namespace, variant: str, seed: int) -> None:
    """Measure one variant, unless it is finished."""
    parameters = {"mode": _models.MODE, "steps": options.steps, "minutes": options.minutes}
    parameters["variant"] = VARIANTS[variant]
    if "context_size" not in VARIANTS[variant]:
        parameters |= {"shortest": options.shortest, "warmup": options.warmup}
    elif options.minutes:
        parameters["steps"] = None  # steps only determine when contexts grow
    methods = {read_out: f"{variant}, {read_out}" for read_out in _models.READ_OUT}
    fold = "first"
    if all(results.find(parameters, method=method, fold=fold, seed=seed) for method in methods.values()):
        return
    arguments: list[object] = ["--measure", "--benchmark", options.benchmark, "--steps", options.steps]
    arguments += ["--shortest", options.shortest, "--warmup", options.warmup]
    arguments += ["--minutes", options.minutes] if options.minutes else []
    arguments += ["--variant", variant, "--seed", seed]
    arguments += ["--data-dir", options.data_dir] if options.data_dir else []
    found = in_fresh_process("benchmarks.ingredients", *arguments)
    scores = found.pop("scores")
    for read_out, method in methods.items():
        kept = {"parameters": parameters, "scores": scores[read_out], **found}
        results.add(method=method, fold=fold, seed=seed, **kept)
    print(f"{variant}, seed {seed}:", ", ".join(f"{k} {v:.3f}" for k, v in scores["placement"].items()), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every unfinished variant and print the table."""
    options = parse(argv)
    if options.measure:
        print(json.dumps(measure(options)))
        return
    results = Results(options.output, {"benchmark": "ingredients", "tissue": options.benchmark})
    for seed in options.seeds:
        for variant in options.variants:
            run(results, options, variant, seed)
    rows = [f"{variant}, {read_out}" for variant in options.variants for read_out in _models.READ_OUT]
    summary = summarize(results.entries, rows, ["first"], options.seeds)
    results.write(summary=summary)
    print(table(summary, [*_placement.METRICS, *COSTS]))


if __name__ == "__main__":
    main()
