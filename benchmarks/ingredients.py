"""What each ingredient of long contexts does to accuracy, time and memory, whole slices as contexts.

Every variant trains for the same time in a process of its own, then places the held-out cells by the conditional mean and by
a chain of 25 steps. Beside the scores of the judge stand the steps that the time was enough for, the seconds of one (the
median of the last tenth) and the peak memory of the process. The first row is the default of the package: contexts of 512
cells out of slices; the second has contexts of 1,024. Run as ``python -m benchmarks.ingredients --benchmark seqfish``;
finished variants are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import _judge, _ours
from benchmarks._data import BENCHMARKS, find_data
from benchmarks._process import in_fresh_process, peak_bytes
from benchmarks._report import Results, summarise, table
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIRS = {"pair_features": "factorized"}
GROWING = {"context_growth": "geometric", "shortest_context": 512}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "contexts of 512": {"train": {"context_size": 512}},
    "contexts of 1,024": {"train": {"context_size": 1024}},
    "full": {},
    "growing": {"train": GROWING},
    "linear": {"model": {"attention": "linear"}},
    "axial": {"model": {"attention": "axial"}},
    "geometric": {"model": {"attention": "geometric"}},
    "geometric, pairs": {"model": {"attention": "geometric", **PAIRS}},
    "neighbor": {"model": {"attention": "neighbor"}},
    "neighbor, pairs": {"model": {"attention": "neighbor", **PAIRS}},
    "neighbor, pairs, growing": {"model": {"attention": "neighbor", **PAIRS}, "train": GROWING},
    "hyper": {"model": {"residual": "hyper"}, "train": GROWING},
    "universal": {"model": {"layer_sharing": "universal"}, "train": GROWING},
    "bottleneck": {"model": {"bottleneck": 4}, "train": GROWING},
    "recomputed": {"train": {**GROWING, "recompute": "all"}},
}
READ_OUT: dict[str, dict[str, Any]] = {"one step": {"n_steps": 1}, "chain": {"n_steps": 25}}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train one variant and score both ways of reading it out."""
    import lightning.pytorch as pl

    import alphastomics as asx

    class Clock(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

    ends: list[float] = []
    (fold, *_) = BENCHMARKS[options.benchmark](find_data(options.data_dir))
    reference, variant = fold.reference.copy(), VARIANTS[options.variant]
    whole = int(reference.obs["slice_id"].value_counts().max())
    asx.model.AlphaSTomics.setup_anndata(reference, position_key="spatial", slice_key="slice_id")
    model = asx.model.AlphaSTomics(reference, mode="expr_to_pos", random_state=options.seed, **variant.get("model", {}))
    arguments: dict[str, Any] = {"context_size": whole, **variant.get("train", {})}
    arguments["batch_size"] = max(1024, arguments["context_size"])
    model.train(max_time=60 * options.minutes, callbacks=[Clock()], enable_progress_bar=False, **arguments)
    training = peak_bytes()
    scores = {}
    for name, read_out in READ_OUT.items():
        predicted = fold.in_source_order(_ours.sample(model, fold.query, seed=options.seed, **read_out))
        scores[name] = _judge.judge(fold.truth, predicted)
    taken = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    last = taken[-max(1, len(taken) // 10) :]
    return {"scores": scores, "n_steps": len(ends), "step": statistics.median(last), "peak": training}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ingredients", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--benchmark", choices=BENCHMARKS, default="seqfish")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, for every variant")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/ingredients_BENCHMARK.json")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.output = options.output or RESULTS / f"ingredients_{options.benchmark}.json"
    return options


def run(results: Results, options: argparse.Namespace, variant: str, seed: int) -> None:
    """Measure one variant, unless that is done."""
    parameters = {"minutes": options.minutes, "variant": VARIANTS[variant]}
    methods = {read_out: f"{variant}, {read_out}" for read_out in READ_OUT}
    fold = "first"
    if all(results.find(parameters, method=method, fold=fold, seed=seed) for method in methods.values()):
        return
    arguments: list[object] = ["--measure", "--benchmark", options.benchmark, "--minutes", options.minutes]
    arguments += ["--variant", variant, "--seed", seed]
    arguments += ["--data-dir", options.data_dir] if options.data_dir else []
    found = in_fresh_process("benchmarks.ingredients", *arguments)
    scores = found.pop("scores")
    for read_out, method in methods.items():
        kept = {"parameters": parameters, "scores": scores[read_out], "seconds": 60 * options.minutes, **found}
        results.add(method=method, fold=fold, seed=seed, **kept)
    figures = ", ".join(f"{key} {value:.3f}" for key, value in scores["one step"].items())
    print(
        f"{variant}, seed {seed}: {figures}; {found['n_steps']} steps, {found['step']:.2f} s, "
        f"{found['peak'] / 2**30:.2f} GiB",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every variant that is not finished, and print the table."""
    options = parse(argv)
    if options.measure:
        print(json.dumps(measure(options)))
        return
    results = Results(options.output, {"benchmark": "ingredients", "tissue": options.benchmark})
    for seed in options.seeds:
        for variant in options.variants:
            run(results, options, variant, seed)
    rows = [f"{variant}, {read_out}" for variant in options.variants for read_out in READ_OUT]
    summary = summarise(results.entries, rows, ["first"], options.seeds)
    results.write(summary=summary)
    print(table(summary, _judge.METRICS))


if __name__ == "__main__":
    main()
