"""Effect of each component of training on the placement: one change at a time, the same number of steps for all.

Models have the mode ``expr_to_pos``. Positions are absent in their contexts, so that the process of positions and the deformation of
contexts have no effect. Run as ``python -m benchmarks.ablation --benchmark starmap_mpfc``; finished variants are kept. The output has
means over folds and seeds of the placement and of the conditional mean for every variant.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import _models, _placement
from benchmarks._data import BENCHMARKS, find_data
from benchmarks._report import Results, summarize, table
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks._data import Fold

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "no distance loss": {"plan": {"lambda_distance": 0.0}},
    "no contrastive loss": {"plan": {"lambda_neighbor": 0.0}},
    "no layout loss": {"plan": {"lambda_layout": 0.0}},
    "fair contexts": {"augmentation": {"composition": 0.0}},
    "no gene dropout": {"augmentation": {"gene_dropout": 0.0}},
    "no thinning": {"augmentation": {"thinning": 0.0}},
    "no dropout": {"model": {"dropout": 0.0}},
    "masking": {"model": {"enable_masking": True}},
    "no gate": {"model": {"gate_type": "none"}},
    "width 64": {"model": {"d_model": 64}},
    "contexts of 1,024": {"train": {"context_size": 1024}},
    "contexts of 256": {"train": {"context_size": 256}},
    "patches": {"train": {"context_kind": "patch"}},
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--benchmark", choices=BENCHMARKS, default="starmap_mpfc")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--folds", type=int, default=1, help="number of folds")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/ablation_BENCHMARK.json")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    options = parser.parse_args(argv)
    options.output = options.output or RESULTS / f"ablation_{options.benchmark}.json"
    return options


def train(fold: Fold, variant: dict[str, dict[str, Any]], *, seed: int, steps: int) -> Any:
    """A model of the fold's reference, trained for a number of steps."""
    import alphastomics as asx

    reference = fold.reference.copy()
    changes = variant.get("augmentation", {})
    asx.model.AlphaSTomics.setup_anndata(reference, position_key="spatial", slice_key="slice_id")
    model = asx.model.AlphaSTomics(reference, mode="expr_to_pos", random_state=seed, **variant.get("model", {}))
    model.train(
        max_epochs=-1,
        max_steps=steps,
        augmentation=dataclasses.replace(model.default_augmentation(), **changes),
        plan_kwargs=variant.get("plan"),
        enable_progress_bar=False,
        **variant.get("train", {}),
    )
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Train and score every unfinished variant and print the table."""
    options = parse(argv)
    folds = BENCHMARKS[options.benchmark](find_data(options.data_dir))[: options.folds]
    results = Results(options.output, {"benchmark": "ablation", "tissue": options.benchmark})
    for name in options.variants:
        for fold in folds:
            for seed in options.seeds:
                run(results, fold, name, seed=seed, steps=options.steps)
    rows = [f"{name}, {read_out}" for name in options.variants for read_out in _models.READ_OUT]
    summary = summarize(results.entries, rows, [fold.name for fold in folds], options.seeds)
    results.write(summary=summary)
    print(table(summary, _placement.METRICS))


def run(results: Results, fold: Fold, name: str, *, seed: int, steps: int) -> None:
    """Train one variant on one fold and score the placement and the conditional mean."""
    parameters = {"steps": steps, "variant": VARIANTS[name]}
    methods = {f"{name}, {read_out}": arguments for read_out, arguments in _models.READ_OUT.items()}
    if all(results.find(parameters, method=method, fold=fold.name, seed=seed) for method in methods):
        return
    start = time.perf_counter()
    model = train(fold, VARIANTS[name], seed=seed, steps=steps)
    seconds = round(time.perf_counter() - start, 1)
    for method, arguments in methods.items():
        predicted = fold.in_source_order(_models.sample(model, fold.query, seed=seed, **arguments))
        scores = _placement.score(fold.truth, predicted)
        results.add(
            method=method, fold=fold.name, seed=seed, parameters=parameters, scores=scores, seconds=0.0,
            train_seconds=seconds,
        )  # fmt: skip
        print(
            f"{fold.name}, seed {seed}, {method}: " + ", ".join(f"{k} {np.round(v, 3)}" for k, v in scores.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
