"""Dependence of the memory of training on the size of the tissue.

A few training steps with contexts of 1,024 cells, on one simulated slice of 10,000 and one of 100,000 cells, each in a
new process. ``beyond_data``: peak minus the peak after imports and minus the data (``X`` and positions).
``training``: peak minus the peak before training, the part that training itself adds. If memory does not depend on the tissue, the
ratio between the two slices is 1. Run as ``python -m benchmarks.memory``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._process import in_fresh_process, peak_bytes
from benchmarks._report import machine, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

RESULT = Path(__file__).parent / "results" / "memory.json"
SMALL, LARGE = 10_000, 100_000
CONTEXT = 1024
QUANTITIES = ("beyond_data", "training")


def make_slice(n_cells: int, n_genes: int) -> AnnData:
    """One slice of sparse counts with a spatial gradient in every gene."""
    import anndata as ad
    import numpy as np
    import pandas as pd
    from scipy import sparse

    rng = np.random.default_rng(0)
    position = rng.uniform(-1, 1, (n_cells, 2))
    direction = rng.normal(size=(2, n_genes))
    blocks = [
        sparse.csr_matrix(rng.poisson(0.3 * np.exp(position[i : i + 5000] @ direction)).astype(np.float32))
        for i in range(0, n_cells, 5000)
    ]
    obs = pd.DataFrame({"slice_id": "one"}, index=[f"cell_{i}" for i in range(n_cells)])
    return ad.AnnData(sparse.vstack(blocks, format="csr"), obs=obs, obsm={"spatial": position})


def measure(path: Path, n_steps: int) -> dict[str, Any]:
    """Peak memory of a few training steps on the slice in a file."""
    import anndata as ad

    import alphastomics as asx

    model_class = asx.model.AlphaSTomics
    imports = peak_bytes()
    adata = ad.read_h5ad(path)
    arrays = (adata.X.data, adata.X.indices, adata.X.indptr, adata.obsm["spatial"])
    data = sum(array.nbytes for array in arrays)
    model_class.setup_anndata(adata, position_key="spatial", slice_key="slice_id")
    model = model_class(adata, mode="expr_to_pos", random_state=0)
    before = peak_bytes()
    model.train(max_epochs=1, max_steps=n_steps, batch_size=CONTEXT, context_size=CONTEXT, enable_progress_bar=False)
    peak = peak_bytes()
    return {
        "n_cells": adata.n_obs,
        "data": data,
        "beyond_data": peak - imports - data,
        "training": peak - before,
        "machine": machine(),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--cells", nargs=2, type=int, default=[SMALL, LARGE], help="cells of the small and the large slice"
    )
    parser.add_argument("--genes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--make", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both slices in fresh processes and print the ratios."""
    options = parse(argv)
    if options.make is not None:
        make_slice(options.make, options.genes).write_h5ad(options.file)
        print(json.dumps({"n_cells": options.make}))
        return
    if options.measure:
        print(json.dumps(measure(options.file, options.steps)))
        return
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for n_cells in options.cells:
            file = Path(folder) / f"{n_cells}.h5ad"
            in_fresh_process("benchmarks.memory", "--make", n_cells, "--genes", options.genes, "--file", file)
            runs.append(in_fresh_process("benchmarks.memory", "--measure", "--steps", options.steps, "--file", file))
    ratios = {quantity: runs[1][quantity] / runs[0][quantity] for quantity in QUANTITIES}
    content = {
        "benchmark": "memory",
        "parameters": {"genes": options.genes, "steps": options.steps, "context_size": CONTEXT},
        "ratios": ratios,
        "runs": runs,
        "versions": versions(),
    }
    write_json(options.output, content)
    for run in runs:
        sizes = ", ".join(f"{q} {run[q] / 2**20:.0f} MiB" for q in ("data", *QUANTITIES))
        print(f"{run['n_cells']:,} cells: {sizes}")
    print("ratio: " + ", ".join(f"{quantity} {value:.2f}" for quantity, value in ratios.items()))


if __name__ == "__main__":
    main()
