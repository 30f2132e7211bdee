"""Comparison of configurations: linear and gated attention, dense and with experts, and variants.

Every configuration has the same training time on the same cells and is scored on a held-out slice by
``asx.tl.evaluate``: positions from expression, and expression from positions. On STARmap each seed holds out another mouse, so
that the result does not depend on one animal; the standard deviation over seeds includes that between mice. All configurations
have the same mice and seeds, so ``difference`` is the gain of a configuration over gated attention within each seed. On
seqFISH, which has one fold, every seed holds out the same slice.

Run as ``python -m benchmarks.compare --benchmark starmap_mpfc``; finished runs are kept in the file of the result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad

from benchmarks._data import find_data, labeled_folds
from benchmarks._report import machine, mean_sd, write_json
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

ANCHOR = "gated"
MASKING = "gated_masking"  # the default network with masking, which is off by default
SEEDS = {"starmap_mpfc": [0, 1, 2], "seqfish": [0]}
MINUTES = {"starmap_mpfc": 1.0, "seqfish": 3.0}
PRINTED = (
    "distance_spearman",
    "knn_preservation",
    "contact_precision",
    "aligned_rmsd",
    "pearson_gene",
    "moran_correlation",
    "adjusted_rand",
    "modality_agreement",
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--benchmark", choices=tuple(SEEDS), default="starmap_mpfc")
    parser.add_argument("--configurations", nargs="+", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, help="default 0 1 2 for starmap_mpfc, 0 for seqfish")
    parser.add_argument(
        "--minutes", type=float, help="training time of each run; default 1 for starmap_mpfc, 3 for seqfish"
    )
    parser.add_argument("--steps", type=int, help="optimizer steps of each run, instead of --minutes")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/compare_BENCHMARK.json")
    parser.add_argument("--figure", type=Path, help="file for a figure")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    options = parser.parse_args(argv)
    options.seeds = SEEDS[options.benchmark] if options.seeds is None else options.seeds
    options.minutes = options.minutes or MINUTES[options.benchmark]
    options.output = options.output or RESULTS / f"compare_{options.benchmark}.json"
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Train and score unfinished runs, and print the table."""
    options = parse(argv)
    run(labeled_folds(options.benchmark, find_data(options.data_dir)), options)


def run(folds: Mapping[str, tuple[ad.AnnData, ad.AnnData]], options: argparse.Namespace, **arguments: Any) -> None:
    """Compare on some folds, with further arguments of ``tl.compare``."""
    import alphastomics as asx

    names = list(folds)
    tissue = ad.concat(folds[names[0]])  # reference and held-out slice of any fold make up the tissue
    budget = {"max_time": 60 * options.minutes} if options.steps is None else {"max_steps": options.steps}
    table = asx.tl.compare(
        tissue,
        configurations=configurations(options.configurations),
        seeds=options.seeds,
        held_out={seed: names[seed % len(names)] for seed in options.seeds},
        slice_key="slice_id",
        cell_type_key="cell_type",
        results=options.output,
        enable_progress_bar=False,
        **budget,
        **arguments,
    )
    found = tissue.uns["comparison"]
    differences = paired_differences(found["runs"])
    finished = json.loads(options.output.read_text())
    runs = {name: finished[name] for name in ("format", "format_version", "runs")}
    header = {"benchmark": "compare", "tissue": options.benchmark, "machine": machine()}
    summary = {"summary": plain(table), "difference": {name: plain(part) for name, part in differences.items()}}
    write_json(options.output, {**header, **summary, **runs})
    if options.figure is not None:
        asx.pl.comparison(tissue, show=False, save=options.figure)
    print(printed(table))


def configurations(names: Sequence[str] | None) -> dict[str, Any]:
    """Configurations by name; by default those of the package and one with masking."""
    import alphastomics as asx
    from alphastomics.tl._compare_configurations import CONFIGURATIONS

    known = CONFIGURATIONS | {MASKING: asx.tl.Configuration(model={"enable_masking": True})}
    return known if names is None else {name: known[name] for name in names}


def paired_differences(runs: pd.DataFrame, anchor: str = ANCHOR) -> dict[str, pd.DataFrame]:
    """Mean and standard deviation over seeds of the difference of each configuration to ``anchor`` with the same seed."""
    if anchor not in set(runs["configuration"]):
        return {}
    values = runs.set_index(["configuration", "seed"]).drop(columns=["held_out", "failed"]).astype(float)
    gain = values.sub(values.loc[anchor], level="seed")
    groups = gain.groupby(level="configuration", sort=False)
    return {"mean": groups.mean(), "sd": groups.std()}


def plain(table: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    """A table as JSON; NaN becomes null."""
    rows = table.astype(float).to_dict(orient="index")
    return {name: {k: None if v != v else v for k, v in row.items()} for name, row in rows.items()}


def printed(table: pd.DataFrame) -> str:
    """The main scores as a Markdown table."""
    rows = plain(table)
    scores = [name for name in PRINTED if name in table]
    costs = ["parameters", "active_parameters", "step_processor_seconds", "validation_loss"]
    lines = [["configuration", *costs, *scores], ["-"] * (1 + len(costs) + len(scores))]
    for name, row in rows.items():
        cells = [
            "" if row[cost] is None else f"{row[cost]:.4g}" if row[cost] < 1e3 else f"{row[cost]:,.0f}"
            for cost in costs
        ]
        cells += ["" if row[score] is None else mean_sd(row[score], row[f"{score}_sd"]) for score in scores]
        lines.append([name, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
