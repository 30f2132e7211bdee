"""Reading of damaged and crafted files: no code may run, nothing may hang, and every error must be one clear line.

Files of every kind that the package reads are changed at random: bits are flipped, pieces cut off, moved and replaced, values
of JSON and YAML removed, renamed, or replaced by other types or huge values, parts of archives, tables and HDF5 replaced, and
pickles inserted that write a file when they are opened. Each file is read in a child process by the function a user would call, for at
most ten seconds. A hang or a crash inside HDF5, on a damaged ``.h5ad`` file, is counted and is not an error of this package. Run as ``python -m benchmarks.fuzz``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, because forks of a process with threads may deadlock

from benchmarks import _children, _inputs
from benchmarks._report import machine, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results" / "fuzz.json"
KINDS = {  # in this order, because others use the model of the first
    "model folders": _inputs.ModelFolders,
    "config.yaml": _inputs.Configurations,
    ".pt and .ckpt": _inputs.TensorFiles,
    "Parquet datasets": _inputs.ParquetDatasets,
    ".h5ad": _inputs.AnnDataFiles,
}
NUMBERS = {name: 500 if name == ".h5ad" else 2500 for name in KINDS}
LIMIT = 10.0  # seconds
GOOD = ("accepted", "refused")
OF_LIBRARY = {".h5ad": ("hang", "crash")}  # about one damaged file in a hundred hangs HDF5
SHOWN = 20  # bad outcomes that are kept


def fuzz(numbers: dict[str, int], folder: Path, seed: int, limit: float) -> dict[str, Any]:
    """Number of files of each kind by result."""
    logging.disable(logging.WARNING)
    found: dict[str, Any] = {}
    for place, (kind, make) in enumerate(KINDS.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inputs = make(folder)
        outcomes = []
        for outcome in _children.run(inputs, range(numbers[kind]), (seed, place), folder, limit):
            outcomes.append(outcome)
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{kind}: {len(outcomes)} of {numbers[kind]}")
        good = (*GOOD, *OF_LIBRARY.get(kind, ()))
        verdicts = Counter(outcome.verdict for outcome in outcomes)
        found[kind] = {
            "files": len(outcomes),
            **{verdict: verdicts[verdict] for verdict in (*GOOD, "unclear", "code", "hang", "crash")},
            "slowest_seconds": max((outcome.seconds for outcome in outcomes), default=0.0),
            "largest_mebibytes": max((outcome.mebibytes for outcome in outcomes), default=0.0),
            "bad": [outcome._asdict() for outcome in outcomes if outcome.verdict not in good][:SHOWN],
        }
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fuzz", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="fraction of the 2,500 files of each kind (500 for .h5ad)"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for each file")
    parser.add_argument("--output", type=Path, default=RESULT)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Read all files and print the results."""
    options = parse(argv)
    kinds = options.kinds or KINDS
    numbers = {kind: round(options.share * n) if kind in kinds else 0 for kind, n in NUMBERS.items()}
    with tempfile.TemporaryDirectory() as name:
        found = fuzz(numbers, Path(name), options.seed, options.limit)
    content = {
        "benchmark": "fuzz",
        "parameters": {"numbers": numbers, "seed": options.seed, "limit_seconds": options.limit},
        "clean": all(not kind["bad"] for kind in found.values()),
        "kinds": found,
        "versions": versions(),
        "machine": machine(),
    }
    write_json(options.output, content)
    for kind, counts in found.items():
        print(f"{kind}: " + ", ".join(f"{value:.3g} {name}" if isinstance(value, float) else f"{value} {name}" for name, value in counts.items() if name != "bad"))  # fmt: skip


if __name__ == "__main__":
    main()
