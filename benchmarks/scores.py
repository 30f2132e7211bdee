"""Time and peak memory of all scores on a large slice.

One simulated slice of 30,000 cells and 200 genes with predicted positions, expression and clusters, and a second one of
the same tissue as reference, are scored by ``tl.evaluate`` with all options, and by each kind of
score alone, in a new process. Time is wall time; ``beyond_data`` is the peak minus the peak after imports
and minus the data (expression, positions). Limits: 60 s and 2 GB on 2 cores. Run as ``python -m benchmarks.scores``.
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

RESULT = Path(__file__).parent / "results" / "scores.json"
MAX_SECONDS, MAX_BYTES = 60, 2 * 10**9
PREDICTED = "predicted"
CLUSTERS = "cluster"


def make_slices(n_cells: int, n_genes: int) -> AnnData:
    """Two slices of a simulated tissue, with predictions of the first."""
    import numpy as np
    from scipy import sparse

    import alphastomics as asx

    adata = asx.datasets.synthetic_tissue(n_slices=2, n_cells=n_cells, n_genes=n_genes, random_state=0)
    rng = np.random.default_rng(0)
    positions = adata.obsm["spatial"]
    adata.obsm["spatial_reconstructed"] = positions + rng.normal(scale=50, size=positions.shape)
    blocks = [
        sparse.csr_matrix(rng.poisson(adata.X[i : i + 5000].toarray() + 0.1).astype(np.float32))
        for i in range(0, adata.n_obs, 5000)
    ]
    adata.layers[PREDICTED] = sparse.vstack(blocks, format="csr")
    wrong = rng.random(adata.n_obs) < 0.3
    codes = adata.obs["cell_type"].cat.codes.to_numpy()
    adata.obs[CLUSTERS] = np.where(wrong, rng.integers(10, size=adata.n_obs), codes)
    return adata


def data_bytes(adata: AnnData) -> int:
    """Bytes of expression and positions."""
    matrices = (adata.X, *adata.layers.values())
    sparse_arrays = [array for m in matrices for array in (m.data, m.indices, m.indptr)]
    return sum(array.nbytes for array in (*sparse_arrays, *adata.obsm.values()))


def measure(path: Path) -> dict[str, Any]:
    """Seconds of every kind of score and of all together, and the peak memory of the process."""
    import anndata as ad

    import alphastomics as asx

    evaluate = asx.tl.evaluate
    imports = peak_bytes()
    both = ad.read_h5ad(path)
    data = data_bytes(both)
    adata, reference = (both[both.obs["slice_id"] == name].copy() for name in ("slice_0", "slice_1"))
    del both
    arguments: dict[str, dict[str, Any]] = {
        "positions": {},
        "expression": {"prediction": None, "expression_layer": PREDICTED},
        "clusters": {"prediction": None, "cluster_key": CLUSTERS},
        "agreement": {"prediction": None, "reference": reference},
    }
    seconds = {}
    start = time.perf_counter()
    table = evaluate(adata, expression_layer=PREDICTED, cluster_key=CLUSTERS, reference=reference)
    seconds["all"] = time.perf_counter() - start
    peak = peak_bytes()
    for part, options in arguments.items():
        start = time.perf_counter()
        evaluate(adata, **options)
        seconds[part] = time.perf_counter() - start
    return {
        "n_cells": adata.n_obs,
        "n_genes": adata.n_vars,
        "seconds": seconds,
        "data": data,
        "beyond_data": peak - imports - data,
        "scores": {name: float(value) for name, value in table.iloc[0].items()},
        "machine": machine(),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scores", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=30_000)
    parser.add_argument("--genes", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Make and score the slices, each in a new process, and print time and memory."""
    options = parse(argv)
    if options.make:
        make_slices(options.cells, options.genes).write_h5ad(options.file)
        print(json.dumps({}))
        return
    if options.measure:
        print(json.dumps(measure(options.file)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "slices.h5ad"
        size = ("--cells", options.cells, "--genes", options.genes)
        in_fresh_process("benchmarks.scores", "--make", *size, "--file", file)
        run = in_fresh_process("benchmarks.scores", "--measure", "--file", file)
    limits = {"seconds": MAX_SECONDS, "bytes": MAX_BYTES}
    write_json(options.output, {"benchmark": "scores", "limits": limits, **run, "versions": versions()})
    print(f"{run['n_cells']:,} cells, {run['n_genes']} genes: {run['beyond_data'] / 2**20:.0f} MiB beyond the data")
    print(", ".join(f"{part} {seconds:.1f} s" for part, seconds in run["seconds"].items()))


if __name__ == "__main__":
    main()
