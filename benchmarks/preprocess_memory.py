"""Dependence of the memory of ``preprocess`` on the size of the tissue.

Simulated slices, the same number for both sizes, with ten times the cells in each. ``peak`` is the peak
resident memory of a new process that runs nothing else, ``imports`` that before it reads data. If memory does not depend on the
tissue, the ratio of the peaks is 1. Run as ``python -m benchmarks.preprocess_memory``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_fresh_process, peak_bytes
from benchmarks._report import machine, versions, write_json
from benchmarks._slices import write_slices

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results" / "preprocess_memory.json"
SMALL, LARGE = 50_000, 500_000


def measure(source: Path, target: Path) -> dict[str, Any]:
    """Peak memory of a run and of its imports."""
    import anndata  # noqa: F401  what the stages import when they begin
    import scipy.spatial  # noqa: F401

    from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess

    imports = peak_bytes()
    preprocess(source, target, Stage1Options(cell_type_key="cell_type"), Stage2Options())
    return {"imports": imports, "peak": peak_bytes(), "machine": machine()}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.preprocess_memory", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--cells", nargs=2, type=int, default=[SMALL, LARGE], help="cells of the small and the large tissue"
    )
    parser.add_argument("--genes", type=int, default=500)
    parser.add_argument("--reads", type=int, default=200, help="counts per cell")
    parser.add_argument("--slices", type=int, default=50)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both in fresh processes and print the ratio."""
    options = parse(argv)
    if options.measure is not None:
        print(json.dumps(measure(*options.measure)))
        return
    runs = []
    for n_cells in options.cells:
        with tempfile.TemporaryDirectory() as name:
            source, target = Path(name) / "raw", Path(name) / "dataset"
            write_slices(source, n_slices=options.slices, n_cells=n_cells, n_genes=options.genes, n_reads=options.reads)
            found = in_fresh_process("benchmarks.preprocess_memory", "--measure", source, target)
            runs.append({"cells": n_cells, **found})
    content = {
        "benchmark": "preprocess_memory",
        "parameters": {"genes": options.genes, "reads": options.reads, "slices": options.slices},
        "ratio": runs[1]["peak"] / runs[0]["peak"],
        "runs": runs,
        "versions": versions(),
    }
    write_json(options.output, content)
    for run in runs:
        print(f"{run['cells']:,} cells: peak {run['peak'] / 2**20:.0f} MiB, imports {run['imports'] / 2**20:.0f} MiB")
    print(f"ratio: {content['ratio']:.2f}")


if __name__ == "__main__":
    main()
