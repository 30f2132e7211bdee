"""Time of a training step and of a placement by this version, by an earlier one (``_earlier.py``) and by LUNA (Yu et al. 2025).

A step has two contexts of 512 cells with 351 genes and the default network of each; the placement is that of a slice of 12,000 cells. Every
measurement runs in a new process with one thread, in alternation, and ``ratios`` are medians over rounds of the time of this version
relative to the others. Run as ``python -m benchmarks.speed --luna DIR``, where ``DIR`` has the released code of LUNA
(https://github.com/mlbio-epfl/LUNA, commit 4ea29c1), whose requirements are installed beside the environments of the other methods.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._earlier import COMMIT, EARLIER, OURS, checkout
from benchmarks._process import ONE_THREAD, ROOT
from benchmarks._report import machine, versions, write_json
from benchmarks._runner import RESULTS
from benchmarks.peers._environment import PEER_DIR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RESULT = RESULTS / "speed.json"
LUNA = "luna"
STEP_CELLS, PLACED_CELLS, GENES = 512, 12_000, 351
REFERENCE = 8500  # cells of a slice of the reference of a training
LUNA_REQUIREMENTS = (
    "linear_attention_transformer==0.19.1",
    *("axial_positional_embedding", "colt5_attention", "einops", "hyper_connections", "linformer", "local_attention"),
    "product_key_memory",
)


def luna_packages() -> Path:
    """Folder with the packages that LUNA requires beyond those of this environment."""
    folder = PEER_DIR / LUNA
    if not (folder / "linear_attention_transformer").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *LUNA_REQUIREMENTS], check=True)
    return folder


def seconds_of(script: str, arguments: Sequence[object], paths: Sequence[Path]) -> float:
    """Seconds that a script measures with ``paths`` before all others."""
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median over rounds of the time of this version relative to each of the others."""
    return {
        name: statistics.median(ours / other for ours, other in zip(seconds[OURS], others, strict=True))
        for name, others in seconds.items()
        if name != OURS
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the result after every round."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--luna", type=Path, help="folder of the code of LUNA; left out when not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="steps of a training; the first 8 are not counted")
    parser.add_argument("--placements", type=int, default=2, help="rounds of placements")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        sources = {OURS: [ROOT / "src"], EARLIER: [checkout(COMMIT, Path(folder))]}
        step: dict[str, list[float]] = {name: [] for name in (*sources, *([LUNA] if options.luna else []))}
        placement: dict[str, list[float]] = {name: [] for name in sources}
        for number in range(max(options.rounds, options.placements)):
            for name, paths in sources.items():
                if number < options.rounds:
                    arguments = ("training", REFERENCE, GENES, options.steps)
                    step[name].append(seconds_of("_timed.py", arguments, paths))
                if number < options.placements:
                    placement[name].append(seconds_of("_timed.py", ("placement", PLACED_CELLS, GENES, 10), paths))
            if options.luna and number < options.rounds:
                arguments = (options.luna, STEP_CELLS, GENES, options.steps // 2)
                step[LUNA].append(seconds_of("_timed_luna.py", arguments, [options.luna, luna_packages()]))
            measured = {"step": step, "placement": placement}
            found = {task: ratios(seconds) for task, seconds in measured.items()}
            write_json(
                options.output,
                {"benchmark": "speed", **measured, "ratios": found, "versions": versions(), "machine": machine()},
            )
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
