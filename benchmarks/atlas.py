"""Peak memory of preprocessing, training and sampling with many genes.

Simulated slices with 20,000 genes and 200,000 cells, of which a twentieth of the values are not 0, are written one after the other.
Then, each in a new process whose peak resident memory is measured: ``preprocess`` converts them to a dataset, ``train`` trains a model
for a few steps, ``sample`` places the cells of a slice. Run as ``python -m benchmarks.atlas``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_fresh_process, peak_bytes
from benchmarks._report import machine, versions, write_json
from benchmarks._slices import write_slices

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results" / "atlas.json"
PARTS = ("preprocess", "train", "sample")
CONTEXT = 512


def preprocess(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """Preprocess the files to a dataset."""
    from alphastomics.data import preprocess as stages

    options = stages.Stage1Options(cell_type_key="cell_type")
    schema = stages.preprocess(folder / "raw", folder / "dataset", options, stages.Stage2Options())
    return {"slices": len(schema.slices), "genes": schema.n_genes}


def train(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train a model on the dataset."""
    import alphastomics as asx

    model = asx.model.AlphaSTomics.from_parquet(folder / "dataset", mode="expr_to_pos", buffer_size=options.buffer_size)
    sizes = {"batch_size": 2 * CONTEXT, "context_size": CONTEXT}
    model.train(max_epochs=1, max_steps=options.steps, enable_progress_bar=False, **sizes)
    model.save(folder / "model")
    return {"steps": options.steps}


def sample(folder: Path, _: argparse.Namespace) -> dict[str, Any]:
    """Sample positions of the cells of a file."""
    import anndata as ad
    import numpy as np

    import alphastomics as asx

    model = asx.model.AlphaSTomics.load(folder / "model", adata=False)
    adata = ad.read_h5ad(min((folder / "raw").glob("*.h5ad")))[:CONTEXT].copy()
    placed = model.sample(adata)
    finite = np.isfinite(placed.obsm["spatial_reconstructed"])
    return {"cells": placed.n_obs, "finite": bool(finite.all())}


def measure(part: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part: its output, seconds and peak memory."""
    start = time.perf_counter()
    found = {"preprocess": preprocess, "train": train, "sample": sample}[part](folder, options)
    return {"part": part, **found, "seconds": time.perf_counter() - start, "peak": peak_bytes(), "machine": machine()}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.atlas", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--reads", type=int, default=1_100, help="counts per cell")
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--buffer-size", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="where files are kept; a temporary folder when not given")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the parts one after the other and print their peaks."""
    options = parse(argv)
    if options.measure is not None:
        print(json.dumps(measure(options.measure, options.folder, options)))
        return
    sizes = {"n_slices": options.slices, "n_cells": options.cells, "n_genes": options.genes, "n_reads": options.reads}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        n_values = write_slices(Path(name) / "raw", **sizes)
        flags = ("--folder", name, "--steps", options.steps, "--buffer-size", options.buffer_size)
        runs = [in_fresh_process("benchmarks.atlas", "--measure", part, *flags) for part in PARTS]
    content = {
        "benchmark": "atlas",
        "parameters": {**sizes, "context_size": CONTEXT, "buffer_size": options.buffer_size},
        "non_zero": n_values / (options.cells * options.genes),
        "peak": max(run["peak"] for run in runs),
        "runs": runs,
        "versions": versions(),
    }
    write_json(options.output, content)
    for run in runs:
        print(f"{run['part']}: peak {run['peak'] / 2**30:.2f} GiB, {run['seconds']:.0f} s")


if __name__ == "__main__":
    main()
