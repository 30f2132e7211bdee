"""Speed of the loader of datasets on disk compared with other loaders, in cells per second.

Simulated counts of several slices, with 500 genes and the share of nonzero values of the seqFISH embryo (29 %), are written as one h5ad
file per slice, converted to a dataset by ``alphastomics.data.preprocess``, and read in batches of one context of 1,024 cells, in
alternation:

- ``first epoch``: the loader of this package from the files, shuffled among a fifth of the cells, with verification of checksums;
- ``later epochs``: the same, after every page was verified;
- ``network units``: the same, transformed and scaled on the CPU;
- ``buffered``: later epochs, shuffled among all cells;
- ``scvi``: ``AnnDataLoader`` over all cells in memory as CSR, shuffled;
- ``backed``: random cells of one backed h5ad file with all cells, sorted, as an array.

The loader of this package returns contexts of one slice, counts with their scaling factors, and positions; the others return counts. None uses
worker processes or threads: each uses one core.

Ratios are medians over the repetitions of its speed over that of the others. Run as ``python -m benchmarks.loading``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._report import machine, markdown, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anndata import AnnData

RESULT = Path(__file__).parent / "results" / "loading.json"
CONTEXT = 1024
DATASET_LOADERS, OTHER_LOADERS = ("first epoch", "later epochs", "network units", "buffered"), ("scvi", "backed")
BACKED_BATCHES = 5


def make_slice(number: int, n_cells: int, n_genes: int) -> AnnData:
    """Negative binomial counts at random positions."""
    import anndata as ad
    import numpy as np
    import pandas as pd
    from scipy import sparse

    rng = np.random.default_rng(number)
    mean = np.random.default_rng(0).gamma(0.6, 0.8, n_genes)
    counts = sparse.csr_matrix(rng.poisson(rng.gamma(2.0, mean / 2, size=(n_cells, n_genes))).astype(np.float32))
    name = f"slice_{number}"
    obs = pd.DataFrame({"slice_id": name}, index=[f"{name}_{i}" for i in range(n_cells)])
    var = pd.DataFrame(index=[f"gene_{i}" for i in range(n_genes)])
    return ad.AnnData(counts, obs=obs, var=var, obsm={"spatial": rng.uniform(0, 1000, (n_cells, 2))})


def make_files(folder: Path, *, n_slices: int, n_cells: int, n_genes: int) -> tuple[int, float]:
    """Write the slices, the dataset and a file of all cells; return the number of cells and their density."""
    import anndata as ad

    from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess

    slices = [make_slice(i, n_cells // n_slices, n_genes) for i in range(n_slices)]
    (folder / "slices").mkdir()
    for i, each in enumerate(slices):
        each.write_h5ad(folder / "slices" / f"slice_{i}.h5ad")
    together = ad.concat(slices)
    together.write_h5ad(folder / "all.h5ad")
    preprocess(folder / "slices", folder / "dataset", Stage1Options(), Stage2Options(train_ratio=1.0, val_ratio=0.0))
    return int(together.n_obs), together.X.nnz / (together.n_obs * n_genes)


def speed(batches: Callable[[], int]) -> float:
    """Cells per second of a function that reads cells and returns their number."""
    start = time.perf_counter()
    n_cells = batches()
    return n_cells / (time.perf_counter() - start)


def readers(folder: Path, n_cells: int) -> dict[str, Callable[[], int]]:
    """Functions that read cells and return their number."""
    import anndata as ad
    import numpy as np
    import scvi

    from alphastomics.data import ContextDataset
    from alphastomics.data._loaders import ContextLoader
    from alphastomics.data.parquet._source import ParquetSource

    def counts(dataset: ContextDataset, epoch: int) -> int:
        dataset.set_epoch(epoch)
        return sum(int(np.count_nonzero(raw.batch.mask)) for raw in ContextLoader(dataset, 1, prefetch=False))

    def encoded(dataset: ContextDataset, epoch: int) -> int:
        dataset.set_epoch(epoch)
        return sum(int(np.count_nonzero(batch.mask)) for batch in ContextLoader(dataset, 1, prefetch=False, raw=False))

    def contexts(buffer_size: int) -> ContextDataset:
        source = ParquetSource(folder / "dataset", buffer_size=buffer_size)
        return ContextDataset(source, context_size=CONTEXT, seed=0)

    streamed, buffered = contexts(n_cells // 5), contexts(n_cells)
    counts(streamed, 0)
    counts(buffered, 0)
    epochs = iter(range(1, 1000))
    in_memory = ad.read_h5ad(folder / "all.h5ad")
    scvi.model.SCVI.setup_anndata(in_memory)
    manager = scvi.model.SCVI(in_memory).adata_manager

    def scvi_loader() -> int:
        loader = scvi.dataloaders.AnnDataLoader(manager, batch_size=CONTEXT, shuffle=True)
        return sum(len(batch["X"]) for batch in loader)

    on_disk, rng = ad.read_h5ad(folder / "all.h5ad", backed="r"), np.random.default_rng(0)

    def backed() -> int:
        for _ in range(BACKED_BATCHES):
            rows = np.sort(rng.choice(n_cells, CONTEXT, replace=False))
            on_disk.X[rows].toarray()
        return BACKED_BATCHES * CONTEXT

    return {
        "first epoch": lambda: counts(contexts(n_cells // 5), 0),
        "later epochs": lambda: counts(streamed, next(epochs)),
        "network units": lambda: encoded(streamed, next(epochs)),
        "buffered": lambda: counts(buffered, next(epochs)),
        "scvi": scvi_loader,
        "backed": backed,
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loading", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=100_000)
    parser.add_argument("--genes", type=int, default=500)
    parser.add_argument("--slices", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the readers alternately and print the ratios."""
    options = parse(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        n_cells, density = make_files(folder, n_slices=options.slices, n_cells=options.cells, n_genes=options.genes)
        read = readers(folder, n_cells)
        turns = [{name: speed(each) for name, each in read.items()} for _ in range(options.turns)]
    ratios: dict[str, dict[str, float]] = {
        one: {other: statistics.median(turn[one] / turn[other] for turn in turns) for other in OTHER_LOADERS}
        for one in DATASET_LOADERS
    }
    content: dict[str, Any] = {
        "benchmark": "loading",
        "parameters": {
            "cells": n_cells, "genes": options.genes, "slices": options.slices, "context_size": CONTEXT,
            "density": density,
        },
        "ratios": ratios,
        "cells_per_second": turns,
        "versions": versions(),
        "machine": machine(),
    }  # fmt: skip
    write_json(options.output, content)
    print(
        markdown(
            [
                ["cells per second over those of", *OTHER_LOADERS],
                *([one, *(f"{ratios[one][o]:.1f}" for o in OTHER_LOADERS)] for one in DATASET_LOADERS),
            ]
        )
    )


if __name__ == "__main__":
    main()
