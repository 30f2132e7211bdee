"""Time per cell of a training with two processes compared with one, each process with one thread.

Simulated slices, trained with default arguments by one process and by two forked processes (``ddp_fork``), in consecutive
pairs; every training is a new process. Time is measured between steps after warming up; cells are those of all processes. Run as
``python -m benchmarks.processes``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from benchmarks._process import ONE_THREAD, in_fresh_process
from benchmarks._report import machine, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results" / "processes.json"
WARM = 5  # steps that are not counted
MIN_SPEEDUP = 1.4  # of two processes
SIZES = {
    "cells": 3072,  # of a slice: whole contexts, so that all processes have as many
    "genes": 351,
    "steps": 20,
}


class Pace(pl.Callback):
    """Records the end of each optimizer step and its number of cells, in a process that may be a fork.

    Attributes
    ----------
    times
        Seconds on a clock that all processes share.
    cells
        Those of this process.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.cells: list[int] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the time."""
        self.times.append(time.monotonic())
        self.cells.append(int(batch.mask.sum()))

    def state_dict(self) -> dict[str, Any]:
        """State that a fork returns."""
        return {"times": self.times, "cells": self.cells}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a fork."""
        self.times, self.cells = state_dict["times"], state_dict["cells"]

    def microseconds(self, n_processes: int) -> float:
        """Time per cell; all processes have equally many cells in a step."""
        return 1e6 * (self.times[-1] - self.times[WARM - 1]) / (n_processes * sum(self.cells[WARM:]))


def measure(n_processes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per cell of a training with some number of processes."""
    import torch

    from alphastomics.datasets import synthetic_tissue
    from alphastomics.model import AlphaSTomics

    torch.set_num_threads(1)
    tissue = synthetic_tissue(n_slices=4, n_cells=options.cells, n_genes=options.genes, random_state=0)
    AlphaSTomics.setup_anndata(tissue, slice_key="slice_id")
    model, pace = AlphaSTomics(tissue), Pace()
    model.train(
        accelerator="cpu",
        precision="32-true",
        devices=n_processes,
        strategy="auto" if n_processes == 1 else "ddp_fork",
        max_steps=WARM + options.steps,
        callbacks=[pace],
        enable_progress_bar=False,
    )
    return {"microseconds": pace.microseconds(n_processes), "machine": machine()}


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians of the times of both, and of the speedup of two processes, pair by pair."""
    return {
        "one": statistics.median(one for one, _ in pairs),
        "two": statistics.median(two for _, two in pairs),
        "ratio": statistics.median(one / two for one, two in pairs),
    }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.processes", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", type=int, choices=(1, 2), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure pairs in fresh processes, one first and then two, and two first and then one."""
    options = parse(argv)
    if options.measure is not None:
        print(json.dumps(measure(options.measure, options)))
        return
    size = [f"--{name}={getattr(options, name)}" for name in SIZES]
    pairs, found = [], {}
    for pair in range(options.pairs):
        for n in (1, 2) if pair % 2 == 0 else (2, 1):
            found[n] = in_fresh_process("benchmarks.processes", "--measure", n, *size, environment=ONE_THREAD)
        pairs.append((found[1]["microseconds"], found[2]["microseconds"]))
        print(f"{pairs[-1][0]:.0f} and {pairs[-1][1]:.0f} microseconds per cell", flush=True)
    content = {
        "benchmark": "processes",
        "parameters": {name: getattr(options, name) for name in (*SIZES, "pairs")},
        "least": MIN_SPEEDUP,
        "summary": summary(pairs),
        "microseconds": {"one": [one for one, _ in pairs], "two": [two for _, two in pairs]},
        "versions": versions(),
        "machine": found[1]["machine"],
    }
    write_json(options.output, content)
    ratio = content["summary"]["ratio"]
    print(f"two processes are {ratio:.2f} times as fast as one; at least {MIN_SPEEDUP} is required")


if __name__ == "__main__":
    main()
