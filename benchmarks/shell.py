"""The complete workflow on the command line: seqFISH ``.h5ad`` files, a dataset, a model, placed cells, scores.

``alphastomics preprocess`` converts both planes of embryo 1 to a dataset; ``train --streaming`` trains on
it, shuffling among fewer cells than it has; ``sample`` places the cells of embryo2_z2 from a file without positions, and ``test`` the
same cells from a file with them. The result of ``sample`` is scored by ``_placement.py``, which shares no code with the
package. Run as ``python -m benchmarks.shell``; ``--help`` lists the options.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import _placement
from benchmarks._data import BENCHMARKS, Fold, find_data
from benchmarks._report import machine, markdown, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULT = Path(__file__).parent / "results" / "shell.json"


def alphastomics(*arguments: str | Path) -> list[str]:
    """Run a command and return its arguments without folders."""
    subprocess.run([sys.executable, "-m", "alphastomics", *map(str, arguments)], check=True)
    return [argument.name if isinstance(argument, Path) else argument for argument in arguments]


def write_files(fold: Fold, folder: Path) -> None:
    """Files of each reference slice, and of the query with and without positions."""
    (folder / "slices").mkdir()
    for name, rows in fold.reference.obs.groupby("slice_id").indices.items():
        fold.reference[rows].copy().write_h5ad(folder / "slices" / f"{name}.h5ad")
    fold.query.write_h5ad(folder / "query.h5ad")
    known = fold.query.copy()
    known.obsm["spatial"] = fold.truth[fold.order]
    known.write_h5ad(folder / "known.h5ad")


def run(fold: Fold, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All commands, one after the other."""
    import anndata as ad

    write_files(fold, folder)
    run_folder = folder / "outputs" / "alphastomics"
    shared: list[str | Path] = ["--checkpoint", run_folder, "--seed", str(options.seed)]
    training = [
        "--mode",
        "expr_to_pos",
        "--max-time",
        str(60 * options.minutes),
        "--buffer-size",
        str(options.buffer_size),
    ]
    commands = [
        alphastomics(
            "preprocess", "--input-dir", folder / "slices", "--output-dir", folder / "dataset", "--train-ratio", "1", "--val-ratio", "0",
        ),
        alphastomics(
            "train", "--data-dir", folder / "dataset", "--streaming", "--output-dir", folder / "outputs",
            "--seed", str(options.seed), *training,
        ),
        alphastomics(
            "sample", *shared, "--input-data", folder / "query.h5ad", "--output", folder / "placed.h5ad", "--refine",
        ),
        alphastomics("test", *shared, "--input-data", folder / "known.h5ad", "--output", folder / "scores.json"),
    ]  # fmt: skip
    placed = fold.in_source_order(ad.read_h5ad(folder / "placed.h5ad").obsm["spatial_reconstructed"])
    tested = json.loads((folder / "scores.json").read_text())
    return {"commands": commands, "sample": _placement.score(fold.truth, placed), "test": tested}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shell", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="training time")
    parser.add_argument("--buffer-size", type=int, default=8000, help="cells among which contexts are shuffled")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the commands and print the scores of the samples."""
    options = parse(argv)
    (fold,) = BENCHMARKS["seqfish"](find_data(options.data_dir))
    with tempfile.TemporaryDirectory() as name:
        found = run(fold, Path(name), options)
    parameters = {name: getattr(options, name) for name in ("minutes", "buffer_size", "seed")}
    content = {"benchmark": "shell", "fold": fold.name, "parameters": parameters, **found}
    write_json(options.output, content | {"versions": versions(), "machine": machine()})
    print(markdown([list(_placement.METRICS), [f"{found['sample'][name]:.3f}" for name in _placement.METRICS]]))


if __name__ == "__main__":
    main()
