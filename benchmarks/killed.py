"""Equality of the files after a stage of preprocessing was killed and run again.

Each stage is run once on simulated slices. Then, for times spread uniformly over the period in which it writes, it is run
in a new folder, killed with SIGKILL at that time, and run again with the same arguments. All files must have the same
bytes, and no other file may remain. Run as ``python -m benchmarks.killed``.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._report import machine, versions, write_json
from benchmarks._slices import write_slices

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results" / "killed.json"
FIRST_OUTPUT = {"stage1": "stage1.json", "stage2": "data.tmp"}  # made before a stage writes cells
KILLED = -9
LIMIT = 600.0


def command(stage: str, source: Path, target: Path) -> list[str]:
    """Run one stage."""
    begin = [sys.executable, "-m", "alphastomics", stage]
    if stage == "stage1":
        return [*begin, "--input-dir", str(source), "--output-dir", str(target), "--cell-type-key", "cell_type"]
    return [*begin, "--input-dirs", str(source), "--output-dir", str(target), "--max-shard-size", "5000"]


def run(arguments: Sequence[str], started: Path, seconds: float | None) -> tuple[int, float]:
    """Run to the end, or kill after some seconds of writing; return the exit status and these seconds."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + LIMIT
    while not started.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    start = time.monotonic()
    try:
        process.wait(LIMIT if seconds is None else seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return process.returncode, time.monotonic() - start


def digests(folder: Path) -> dict[str, str]:
    """Hash of every file in a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def compare(stage: str, source: Path, folder: Path, moments: Sequence[float]) -> dict[str, Any]:
    """An uninterrupted run, and one killed at each moment, a fraction of its duration."""
    straight = folder / f"{stage}_straight"
    status, seconds = run(command(stage, source, straight), straight / FIRST_OUTPUT[stage], None)
    if status != 0:
        raise RuntimeError(f"{stage} ended with status {status}")
    truth, runs = digests(straight), []
    for share in moments:
        moment, target = share, folder / f"{stage}_killed"
        arguments = command(stage, source, target)
        while run(arguments, target / FIRST_OUTPUT[stage], moment * seconds)[0] != KILLED:
            shutil.rmtree(target)  # it finished first; kill earlier
            moment /= 2
        before = digests(target)
        subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT)
        runs.append(
            {
                "moment": round(moment, 3),
                "finished_files": len(before.items() & truth.items()),
                "identical": digests(target) == truth,
            }
        )
        shutil.rmtree(target)
    return {"stage": stage, "seconds": seconds, "files": len(truth), "runs": runs}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.killed", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=40_000)
    parser.add_argument("--genes", type=int, default=500)
    parser.add_argument("--reads", type=int, default=200, help="counts per cell")
    parser.add_argument("--slices", type=int, default=20)
    parser.add_argument("--moments", type=int, default=10, help="kills in each stage")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Kill both stages and print how many runs give the same files."""
    options, rng = parse(argv), random.Random(0)
    sizes = {"n_slices": options.slices, "n_cells": options.cells, "n_genes": options.genes, "n_reads": options.reads}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_slices(folder / "raw", **sizes)
        sources = {"stage1": folder / "raw", "stage2": folder / "stage1_straight"}
        stages = [
            compare(stage, source, folder, [rng.random() for _ in range(options.moments)])
            for stage, source in sources.items()
        ]
    content = {
        "benchmark": "killed",
        "parameters": {**sizes, "moments": options.moments},
        "identical": all(each["identical"] for stage in stages for each in stage["runs"]),
        "stages": stages,
        "versions": versions(),
        "machine": machine(),
    }
    write_json(options.output, content)
    for stage in stages:
        same = sum(each["identical"] for each in stage["runs"])
        print(
            f"{stage['stage']}: {same} of {len(stage['runs'])} killed runs give the same files as the uninterrupted one"
        )


if __name__ == "__main__":
    main()
