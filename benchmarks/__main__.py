"""All benchmarks in order: ``python -m benchmarks [--model-dir DIR] [--data-dir DIR]``.

Each runs in its own process. Finished runs are kept, so an interrupted command can be run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks._held_out import TISSUES
from benchmarks._runner import RESULTS

WHOLE_SLICES = (
    *("--minutes", "30", "--steps", "5600", "--shortest", "512", "--warmup", "0.95", "--seeds", "0", "1"),
    *("--variants", "contexts of 1,024", "full", "--output", str(RESULTS / "whole_slices.json")),
)
MOSTLY_KNOWN = {
    "mostly_known": ("--known-share", "0.8", "--minutes", "0", "--within"),
    "mostly_known_model_of_another": ("--known-share", "0.8", "--minutes", "0"),
}
INGREDIENTS = {"seqfish": "400", "starmap3d": "200"}  # steps
CALIBRATED = ("seqfish", "starmap_mpfc", "drosophila3d", "hypothalamus")
HELD_OUT = ("pos_to_expr", "directions", "gene_inpainting", "uncertainty", "joint", "embeddings", "likelihood")
MEASURING = (
    *("chains", "claims", "denoiser_speed", "experts", "loading", "memory", "scores", "size", "speed", "waiting"),
    *("preprocess_memory", "preprocess_speed", "killed", "killed_training", "fuzz", "atlas", "processes"),
    *("unmatched", "ablation"),
)
MODELS = Path(__file__).parent / "models"


def main() -> None:
    """Run all; stop at the first that fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run every benchmark, resumable.")
    parser.add_argument("--model-dir", type=Path, default=MODELS, help="folder of trained models")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    options = parser.parse_args()
    data = ["--data-dir", options.data_dir] if options.data_dir else []
    shared = ["--model-dir", str(options.model_dir), *data]
    # First those whose training time the package chooses: models of another time replace these.
    runs = [["unseen", *shared], ["picture", *shared]]
    runs += [
        ["known_positions", *shared, *flags, "--benchmark", tissue, "--output", str(RESULTS / f"{name}_{tissue}.json")]
        for tissue in ("seqfish", "hypothalamus")
        for name, flags in MOSTLY_KNOWN.items()
    ]  # fmt: skip
    runs += [["dissociated", *shared], ["gallery", "--model-dir", str(options.model_dir / "gallery"), *data]]
    runs += [
        [name, *shared, "--benchmark", tissue] for tissue in CALIBRATED for name in ("calibration", "known_positions")
    ]
    runs += [
        [
            *("calibration", *shared, "--benchmark", tissue, "--mode", "expr_to_pos"),
            *("--output", str(RESULTS / f"calibration_{tissue}_expr_to_pos.json")),
        ]
        for tissue in CALIBRATED[:3]
    ]
    runs += [["heuristics", *shared, "--benchmark", tissue] for tissue in ("starmap_mpfc", "drosophila3d")]
    runs.append(["heuristics", *shared, "--benchmark", "seqfish", "--cells", "2000"])
    runs.append(["levers", *data, "--steps", "800", "--tissues", "starmap_mpfc", "hypothalamus"])
    runs += [[name, *shared, "--benchmark", tissue] for tissue in TISSUES for name in HELD_OUT]
    runs += [["shell", *data], ["time_to_accuracy", *data]]
    runs += [["compare", *data, "--benchmark", tissue] for tissue in TISSUES]
    runs.append(["long_context", *data])
    runs += [["ingredients", *data, "--benchmark", tissue, "--steps", steps] for tissue, steps in INGREDIENTS.items()]
    runs.append(["ingredients", *data, *WHOLE_SLICES])
    runs.append(["arithmetic", "--measure"])
    for name, *arguments in [*runs, *([name] for name in MEASURING)]:
        print(f"\n=== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True)


if __name__ == "__main__":
    main()
