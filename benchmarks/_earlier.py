"""Placements by an earlier version of the package, whose public interface is the same, or by this one, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks._process import ONE_THREAD, ROOT
from benchmarks._runner import store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from benchmarks._data import Fold
    from benchmarks._report import Results

COMMIT = "29fee2f"
OURS, EARLIER = "alphastomics", f"commit {COMMIT}"  # methods in results


def checkout(commit: str, folder: Path) -> Path:
    """Source folder of the package at a commit."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    return folder / "src"


def place(fold: Fold, source: Path, seed: int, minutes: float | None = None) -> tuple[NDArray[np.float64], float]:
    """Positions of the query by the package in a source folder, in the order of ``fold.truth``, and seconds.

    The package has its default settings and one thread; ``minutes`` is its ``max_time``, None: no limit.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        reference, query, output = (Path(name) / part for part in ("reference.h5ad", "query.h5ad", "positions.npy"))
        fold.reference.write_h5ad(reference)
        fold.query.write_h5ad(query)
        script = ROOT / "benchmarks" / "_timed_reconstruct.py"
        limit = [] if minutes is None else [60 * minutes]
        command = [sys.executable, "-W", "ignore", script, reference, query, output, seed, *limit]
        environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(source)}
        subprocess.run(list(map(str, command)), env=environment, stderr=subprocess.DEVNULL, check=True)
        return fold.in_source_order(np.load(output)), round(time.perf_counter() - start, 1)


def run_earlier(results: Results, fold: Fold, seed: int) -> None:
    """Place the query of a fold by the version ``COMMIT`` without a limit of time, unless it is finished."""
    if results.find({}, method=EARLIER, fold=fold.name, seed=seed) is None:
        with tempfile.TemporaryDirectory() as folder:
            positions, seconds = place(fold, checkout(COMMIT, Path(folder)), seed)
        store(results, fold, EARLIER, seed, {}, positions, seconds)
