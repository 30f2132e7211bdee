"""Seconds of a training step or of a placement by the version of the package on the path; the last line of output is JSON.

Run as ``python benchmarks/_timed.py training|placement CELLS GENES STEPS``, also with earlier versions, whose public interface is the same.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import lightning.pytorch as pl

WARM = 8  # steps that are not counted
TRAINING = {"accelerator": "cpu", "precision": "32-true", "enable_progress_bar": False}
BATCH = {"batch_size": 1024, "context_size": 512}


class Clock(pl.Callback):
    """Times at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, *_: object) -> None:
        """Read the clock."""
        self.times.append(time.perf_counter())


def seconds_of(task: str, n_cells: int, n_genes: int, n_steps: int) -> float:
    """Median seconds of a step with two contexts of 512 cells, or seconds of the placement of a slice of ``n_cells``."""
    from alphastomics.datasets import synthetic_tissue
    from alphastomics.model import AlphaSTomics

    tissue = synthetic_tissue(n_slices=2, n_cells=n_cells, n_genes=n_genes, random_state=0)
    first = (tissue.obs["slice_id"] == tissue.obs["slice_id"].iloc[0]).to_numpy()
    reference = tissue if task == "training" else tissue[first][:3000].copy()
    AlphaSTomics.setup_anndata(reference)
    model, clock = AlphaSTomics(reference), Clock()
    model.train(max_steps=n_steps, callbacks=[clock], **BATCH, **TRAINING)
    if task == "training":
        return statistics.median(b - a for a, b in zip(clock.times[WARM:], clock.times[WARM + 1 :], strict=False))
    start = time.perf_counter()
    model.sample(tissue[~first].copy(), mode="expr_to_pos")
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps({"seconds": seconds_of(sys.argv[1], *map(int, sys.argv[2:]))}))
