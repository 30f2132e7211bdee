r"""The tables of ``docs/arithmetic.md`` (memory, time and devices of a training up to 10⁸ cells) and of ``docs/scaling.md``.

``python -m benchmarks.arithmetic`` prints them from the committed results. Weights and floating-point operations are computed by
formulas, which tests compare with the network and with PyTorch's count. Memory is estimated by
:func:`~alphastomics.train.memory.estimate.estimate_training`. The speed of CPUs is from ``results/waiting.json``, that of loading from
``results/loading.json``; ``python -m benchmarks.arithmetic --measure`` measures bytes on disk.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphastomics.config import NetworkConfig
from alphastomics.nn.attention.softmax import KEY_STRIDE
from alphastomics.train.forward import FRAME_CELLS
from benchmarks._report import machine, versions, write_json
from benchmarks._runner import RESULTS
from benchmarks.long_context_page import GIB, rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RESULT = RESULTS / "arithmetic.json"
FREQUENCIES, RANKS, LATENT, CHANNELS = 48, 9, 64, 32  # of the network, for any width; the last of a head, at most
MEMORY = ("weights, GiB", "gradients", "moments, average", "activations", "total", "activations, KiB per cell")
BATCH, CONTEXT = 1024, 512  # cells of a batch, and of a context
PEAK, UTILIZATION = 312e12, 0.1  # FLOP/s of an A100 in bfloat16 by its data sheet; assumed utilization
HOUR, DAY = 3600, 86400
SHARED_CELLS, SHARED_BY = 8192, (1, 2, 4)  # cells of a context, and numbers of processes that share it


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A network of the default kind.

    Parameters
    ----------
    width, layers, heads, genes, dims
        d, L, h, G and D.
    """

    width: int = NetworkConfig.d_model
    layers: int = NetworkConfig.n_layers
    heads: int = NetworkConfig.n_heads
    genes: int = 500
    dims: int = 2

    @property
    def attention(self) -> int:
        """Channels a of all heads."""
        return self.heads * min(self.width // self.heads, CHANNELS)

    @property
    def n_parameters(self) -> int:
        """Number of weights."""
        d, g, n_dims, h, a = self.width, self.genes, self.dims, self.heads, self.attention
        block = 14 * d**2 + 4 * d * a + (12 + h) * d + 3 * a + 2 * a // h
        encoder = 2 * d * g + 4 * d**2 + (12 + 2 * LATENT) * d + LATENT  # of the cells alone
        return encoder + 4 * d * g + g + 8 * d**2 + (311 + 2 * n_dims) * d + 64 + n_dims + self.layers * block

    def flops(self, n_cells: int = CONTEXT) -> float:
        """Floating-point operations for a cell of a step of training, forward and backward, in contexts of so many cells.

        Positions are an input: the embeddings of neighborhoods, of which other contexts have a loss, are left out.
        """
        d, g, n_dims, a = self.width, self.genes, self.dims, self.attention
        entry = 3 * d * g + (2 * FREQUENCIES + n_dims + RANKS) * d  # inputs, which need no gradient
        encoder = entry + 4 * d**2
        blocks = self.layers * (8 * d**2 + 2 * d * a + d * self.heads)
        keys = 2 * self.layers * d * a  # and values
        ends = d * g + d * n_dims
        attention = 4 * self.layers * a * n_cells / KEY_STRIDE
        step = 3 * (2 * (encoder + blocks + keys / KEY_STRIDE + ends) + attention) - 2 * entry
        cells = min(FRAME_CELLS, n_cells)
        expression = 2 * d * g + 2 * d**2
        canonical = 2 * (expression + blocks + keys + d * n_dims) + 4 * self.layers * a * cells
        return step + canonical * cells / n_cells


# Cells of a dataset, a network and a number of epochs: values to try first.
TRAININGS = (
    (10_000, Size(), 400),
    (100_000, Size(), 40),
    (1_000_000, Size(width=256, layers=6, heads=8), 20),
    (10_000_000, Size(width=512, layers=8, heads=8), 10),
    (100_000_000, Size(width=768, layers=12, heads=12), 5),
    (100_000_000, Size(width=768, layers=12, heads=12, genes=20_000), 5),
)


def short(number: float) -> str:
    """A number with two digits, or all digits before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def measured(folder: Path = RESULTS) -> dict[str, float]:
    """Measured FLOP/s of two cores in training, cells/s of loading, bytes per cell on disk."""
    waiting = json.loads((folder / "waiting.json").read_text())
    loading = json.loads((folder / "loading.json").read_text())
    genes = waiting["parameters"]["genes"]
    seconds = waiting["training"]["in memory"]["milliseconds"] / 1000
    disk = json.loads((folder / "arithmetic.json").read_text())["disk"]
    atlas = json.loads((folder / "atlas.json").read_text())
    return {
        "flops": BATCH * Size(genes=genes).flops() / seconds,
        "cells": BATCH / seconds,
        "loading": statistics.median(run["network units"] for run in loading["cells_per_second"]),
        "bytes": disk["bytes_per_cell"] / disk["non_zero_per_cell"],
        "non_zero, 500 genes": disk["non_zero_per_cell"],
        "non_zero, 20000 genes": atlas["non_zero"] * atlas["parameters"]["n_genes"],
    }


def parameters_table() -> str:
    """Table of weights and memory of a training step."""
    from alphastomics.nn import DenoiserConfig
    from alphastomics.train.memory.estimate import estimate_training

    lines = [["d", "L", "G", "weights", "MFLOP per cell", *MEMORY]]
    for size in dict.fromkeys(size for _, size, _ in TRAININGS):
        config = DenoiserConfig(
            n_genes=size.genes, n_dims=size.dims, d_model=size.width, n_layers=size.layers, n_heads=size.heads
        )
        found = estimate_training(config, n_cells=CONTEXT, n_contexts=BATCH // CONTEXT, accumulate=True)
        parts = [found.parameters, found.gradients, found.optimizer, found.activations, found.peak]
        lines.append(
            [
                *map(str, (size.width, size.layers, f"{size.genes:,}", f"{size.n_parameters:,}")),
                f"{size.flops() / 1e6:.1f}",
                *(f"{part / GIB:.2f}" for part in parts),
                f"{found.activations / BATCH / 1024:.0f}",
            ]
        )
    return rows(lines)


def constants_table(folder: Path = RESULTS) -> str:
    """Table of measurements."""
    found = measured(folder)
    lines = [
        ["quantity", "value", "source"],
        ["training on two cores, 500 genes", f"{found['cells']:,.0f} cells/s", "`benchmarks.waiting`"],
        ["training, by the formula above", f"{found['flops'] / 1e9:.1f} GFLOP/s", "`benchmarks.waiting`"],
        ["loading in one process, 500 genes", f"{found['loading']:,.0f} cells/s", "`benchmarks.loading`"],
        ["a dataset on disk", f"{found['bytes']:.1f} bytes per entry", "`benchmarks.arithmetic --measure`"],
        [
            "nonzero entries per cell, 500 genes",
            f"{found['non_zero, 500 genes']:.0f}",
            "`benchmarks.arithmetic --measure`",
        ],
        ["nonzero entries per cell, 20,000 genes", f"{found['non_zero, 20000 genes']:.0f}", "`benchmarks.atlas`"],
    ]
    return rows(lines)


def trainings_table(folder: Path = RESULTS) -> str:
    """Table of trainings by size of the dataset."""
    found = measured(folder)
    lines = [
        ["cells", "d, L, G", "passes", "steps", "PFLOP", "two cores", "GPU-hours", "GPUs for one hour", "GB on disk"]
    ]
    for cells, size, passes in TRAININGS:
        work = cells * passes * size.flops()
        hours = work / (PEAK * UTILIZATION) / HOUR
        entries = found[f"non_zero, {size.genes} genes"]
        lines.append(
            [
                f"{cells:,}",
                f"{size.width}, {size.layers}, {size.genes:,}",
                str(passes),
                f"{-(-cells * passes // BATCH):,}",
                short(work / 1e15),
                f"{short(work / found['flops'] / DAY)} days",
                short(hours),
                str(math.ceil(hours)),
                short(cells * entries * found["bytes"] / 1e9),
            ]
        )
    return rows(lines)


def loading_table(folder: Path = RESULTS) -> str:
    """Table of cells per second of a GPU, and of the loaders needed."""
    rate = measured(folder)["loading"]
    lines = [["d, L", "cells/s of a GPU", "cells/s of a loader", "loaders per GPU"]]
    for size in dict.fromkeys(size for _, size, _ in TRAININGS if size.genes == Size().genes):
        taken = PEAK * UTILIZATION / size.flops()
        lines.append([f"{size.width}, {size.layers}", f"{taken:,.0f}", f"{rate:,.0f}", short(taken / rate)])
    return rows(lines)


def tables(folder: Path = RESULTS) -> Iterator[str]:
    """Every table of the page."""
    yield parameters_table()
    yield constants_table(folder)
    yield trainings_table(folder)
    yield loading_table(folder)


def split_table() -> str:
    """Memory of a step whose context is shared by processes, for every kind of attention: the table of ``docs/scaling.md``."""
    from alphastomics.nn import DenoiserConfig
    from alphastomics.train.memory.estimate import estimate_training

    lines = [["GiB of activations", *(f"{n} process{'es' * (n > 1)}" for n in SHARED_BY), "one block alone"]]
    for attention in ("full", "linear", "geometric", "neighbor", "axial"):
        found = [
            [
                estimate_training(
                    DenoiserConfig(n_genes=200, n_dims=2, attention=attention, n_layers=layers),
                    n_cells=SHARED_CELLS,
                    group_size=n,
                ).activations
                / GIB
                for layers in (4, 5)
            ]
            for n in SHARED_BY
        ]
        blocks = ", ".join(f"{five - four:.3f}" for four, five in found)
        lines.append([attention, *(f"{four:.2f}" for four, _ in found), blocks])
    return rows(lines)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes of a dataset of simulated counts."""
    from benchmarks.loading import make_files

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        n, density = make_files(folder, n_slices=5, n_cells=options.cells, n_genes=options.genes)
        files = list((folder / "dataset" / "data").rglob("*.parquet"))
        return {
            "bytes_per_cell": sum(path.stat().st_size for path in files) / n,
            "non_zero_per_cell": density * options.genes,
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, or measure bytes on disk."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arithmetic", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="measure bytes on disk")
    parser.add_argument("--cells", type=int, default=20_000)
    parser.add_argument("--genes", type=int, default=500)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    if not options.measure:
        print("\n\n".join([*tables(), split_table()]))
        return
    content = {
        "benchmark": "arithmetic",
        "parameters": {"cells": options.cells, "genes": options.genes, "slices": 5, "seed": "number of the slice"},
        "disk": measure(options),
        "versions": versions(),
        "machine": machine(),
    }
    write_json(options.output, content)


if __name__ == "__main__":
    main()
