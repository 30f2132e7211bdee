"""Speed of ``preprocess`` compared with processing in memory.

Simulated slices, one file each. ``preprocess`` converts them to a dataset: two passes, cells along a curve, a split, library
sizes and moments, checksums. ``in memory`` reads the same files with anndata, concatenates them, normalizes with scanpy
(``normalize_total``, ``log1p``, and optionally ``scale`` without centering, which keeps zeros) and writes the same columns with
pyarrow, all with default arguments. Each runs in its own process on one core, in alternation, after a run on few cells that
excludes imports and compilation. Ratios are medians over the repetitions of our speed over that of the other, by
wall time and by processor time, which other programs affect less. Run as ``python -m benchmarks.preprocess_speed``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import ONE_THREAD, in_fresh_process
from benchmarks._report import machine, versions, write_json
from benchmarks._slices import write_slices

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results" / "preprocess_speed.json"
PREPROCESS, IN_MEMORY = "preprocess", ("in memory", "in memory, scaled")
CLOCKS = ("seconds", "processor_seconds")
FEW = 1000


def in_memory(source: Path, target: Path, *, scale: bool) -> None:
    """Read, normalize and write all cells at once."""
    import anndata as ad
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import scanpy as sc

    from alphastomics.data.parquet._columns import DENSE

    adata = ad.concat([ad.read_h5ad(path) for path in sorted(source.glob("*.h5ad"))])
    sc.pp.normalize_total(adata)
    sc.pp.log1p(adata)
    if scale:
        sc.pp.scale(adata, zero_center=False)
    x, place = adata.X, adata.obsm["spatial"]
    columns = {
        "cell_id": pa.array(adata.obs_names),
        "slice_id": pa.array(adata.obs["slice_id"].astype(str)),
        "cell_type": pa.array(adata.obs["cell_type"].astype(str)),
        "position": pa.FixedSizeListArray.from_arrays(pa.array(place.ravel()), place.shape[1]),
    }
    if x.nnz > DENSE * x.shape[0] * x.shape[1]:
        flat = pa.array(x.toarray().ravel())
        columns["expression"] = pa.FixedSizeListArray.from_arrays(flat, x.shape[1])
    else:
        ends = pa.array(x.indptr.astype(np.int32))
        columns["indices"] = pa.ListArray.from_arrays(ends, pa.array(x.indices.astype(np.int32)))
        columns["values"] = pa.ListArray.from_arrays(ends, pa.array(x.data))
    target.mkdir()
    pq.write_table(pa.table(columns), target / "train.parquet")


def stages(source: Path, target: Path) -> None:
    """The stages, with their defaults."""
    from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess

    preprocess(source, target, Stage1Options(cell_type_key="cell_type"), Stage2Options())


def measure(way: str, source: Path, few: Path) -> dict[str, float]:
    """Seconds of one method on one core."""
    import pyarrow as pa

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pa.set_cpu_count(1)
    run = stages if way == PREPROCESS else lambda *paths: in_memory(*paths, scale=way == IN_MEMORY[1])
    with tempfile.TemporaryDirectory(dir=source.parent) as name:
        run(few, Path(name) / "few")
        clock, processor = time.perf_counter(), time.process_time()
        run(source, Path(name) / "all")
        return {CLOCKS[0]: time.perf_counter() - clock, CLOCKS[1]: time.process_time() - processor}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.preprocess_speed", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=500_000)
    parser.add_argument("--genes", type=int, default=500)
    parser.add_argument("--reads", type=int, default=200, help="counts per cell")
    parser.add_argument("--slices", type=int, default=50)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", choices=[PREPROCESS, *IN_MEMORY], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the methods alternately and print the ratios."""
    options = parse(argv)
    if options.measure is not None:
        print(json.dumps(measure(options.measure, options.folder / "raw", options.folder / "few")))
        return
    turns: list[dict[str, dict[str, float]]] = []
    sizes = {"n_slices": options.slices, "n_genes": options.genes, "n_reads": options.reads}
    with tempfile.TemporaryDirectory() as name:
        write_slices(Path(name) / "raw", n_cells=options.cells, **sizes)
        write_slices(Path(name) / "few", n_cells=FEW, **(sizes | {"n_slices": 2}))
        for turn in range(options.turns):
            ways = [PREPROCESS, *IN_MEMORY] if turn % 2 == 0 else [*reversed(IN_MEMORY), PREPROCESS]
            arguments = [("--measure", way, "--folder", name) for way in ways]
            found = [
                in_fresh_process("benchmarks.preprocess_speed", *each, environment=ONE_THREAD) for each in arguments
            ]
            turns.append(dict(zip(ways, found, strict=True)))
    ratios = {
        other: {
            clock: statistics.median(turn[other][clock] / turn[PREPROCESS][clock] for turn in turns) for clock in CLOCKS
        }
        for other in IN_MEMORY
    }
    content: dict[str, Any] = {
        "benchmark": "preprocess_speed",
        "parameters": {"cells": options.cells, **sizes},
        "ratios": ratios,
        "turns": turns,
        "versions": versions(),
        "machine": machine(),
    }
    write_json(options.output, content)
    for other, ratio in ratios.items():
        print(f"speed over that {other}: {ratio[CLOCKS[0]]:.2f} in wall time, {ratio[CLOCKS[1]]:.2f} in processor time")


if __name__ == "__main__":
    main()
