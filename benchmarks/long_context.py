"""Memory and time of long contexts.

- ``steps``: training steps on one simulated slice of 200 genes with all of its cells in one context, through
  ``AlphaSTomics.train`` in float32 on all cores: the default long-context model (neighbor attention with pair features)
  at 16,384, 65,536 and 100,000 cells, there also with all blocks recomputed, and the other sub-quadratic settings at
  the first two. Peaks are those of the whole process minus that before training; the time is that of the fastest step after
  the first.
- ``estimates``: the result of ``model.estimate_memory`` compared with the peak that the step adds to its process.
- ``operations``: time of the nearest neighbors of 100,000 cells, and of grid attention and full attention at 16,384 cells,
  the fastest of several repetitions.
- ``sampling``: all 32,845 cells of a slice in three dimensions (STARmap) with half of their positions observed, by a model
  that was trained for a few steps. Requires the data.

Every run has its own process, and finished runs with the same parameters are kept.
Run as ``python -m benchmarks.long_context [--parts steps …]``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._data import find_data
from benchmarks._process import RETURN_MEMORY, in_fresh_process, peak_bytes
from benchmarks._report import Results, machine, markdown
from benchmarks.memory import make_slice

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path as Folder

    from anndata import AnnData

RESULT = Path(__file__).parent / "results" / "long_context.json"
GENES = 200
LONG = {"attention": "neighbor", "pair_features": "factorized"}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": LONG,
    "neighbor": {"attention": "neighbor"},
    "axial": {"attention": "axial"},
    "linear": {"attention": "linear"},
}
SMALL, LARGE, WHOLE = 16_384, 65_536, 100_000
RECOMPUTED = "default, recomputed"
STEPS = [(name, n) for name in SETTINGS for n in (SMALL, LARGE)] + [("default", WHOLE), (RECOMPUTED, WHOLE)]
ESTIMATED: dict[str, tuple[dict[str, Any], int, str]] = {  # model, cells, recompute
    "full": ({"attention": "full"}, 8192, "none"),
    "geometric, pairs": ({"attention": "geometric", "pair_features": "factorized"}, 8192, "none"),
    "neighbor, pairs": (LONG, 16_384, "none"),
    "neighbor, recomputed": ({"attention": "neighbor"}, 32_768, "all"),
    "axial, hyper": ({"attention": "axial", "residual": "hyper"}, 8192, "none"),
    "linear, shared": ({"attention": "linear", "layer_sharing": "universal", "n_layers": 6}, 32_768, "none"),
}
PARTS = ("steps", "estimates", "operations", "sampling")


def train(adata: AnnData, arguments: dict[str, Any], *, n_steps: int, recompute: str = "auto") -> dict[str, Any]:
    """Train with the largest slice as one context; return the model, seconds of each step, and peak bytes."""
    import lightning.pytorch as pl

    from alphastomics.model import AlphaSTomics

    class Clock(pl.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            self.start = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            seconds.append(time.perf_counter() - self.start)

    seconds: list[float] = []
    n_cells = int(adata.obs["slice_id"].value_counts().max())
    AlphaSTomics.setup_anndata(adata, slice_key="slice_id")
    model = AlphaSTomics(adata, mode="expr_to_pos", random_state=0, **arguments)
    before = peak_bytes()
    model.train(
        max_steps=n_steps, max_epochs=n_steps, context_size=n_cells, batch_size=n_cells, precision="32-true", accelerator="cpu",
        recompute=recompute, callbacks=[Clock()], enable_progress_bar=False,
    )  # fmt: skip
    return {"model": model, "seconds": seconds, "peak": peak_bytes() - before, "process": peak_bytes()}


def step(options: argparse.Namespace) -> dict[str, Any]:
    """Part ``steps``."""
    import anndata as ad

    recomputed = options.setting == RECOMPUTED
    arguments, recompute = (LONG, "all") if recomputed else (SETTINGS[options.setting], "auto")
    done = train(ad.read_h5ad(options.file), arguments, n_steps=options.steps, recompute=recompute)
    seconds = done["seconds"]
    return {"seconds": min(seconds[1:] or seconds), "peak": done["peak"], "process": done["process"]}


def estimate(options: argparse.Namespace) -> dict[str, Any]:
    """Part ``estimates``."""
    import anndata as ad

    arguments, n_cells, recompute = ESTIMATED[options.setting]
    adata = ad.read_h5ad(options.file)
    done = train(adata, arguments, n_steps=2, recompute=recompute)
    estimated = done["model"].estimate_memory(n_cells, n_cells, precision="32", recompute=recompute, accelerator="cpu")
    return {"estimate": estimated.peak, "peak": done["peak"], "ratio": estimated.peak / done["peak"]}


def operation(options: argparse.Namespace) -> dict[str, Any]:
    """Part ``operations``."""
    import torch

    from alphastomics.nn.attention.grid import GridAttention
    from alphastomics.nn.attention.softmax import SoftmaxAttention
    from alphastomics.nn.geometry import Geometry
    from alphastomics.nn.neighbors import neighbor_pairs

    torch.manual_seed(0)
    position = torch.rand(1, WHOLE, 2)
    x, geometry = torch.randn(1, SMALL, 128), Geometry(position[:, :SMALL])
    grid, full = GridAttention(128, 4, n_dims=2), SoftmaxAttention(128, 4)
    calls = {
        "nearest cells": lambda: neighbor_pairs(position, k=32),
        "grid": lambda: grid(x, geometry),
        "full": lambda: full(x),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(options.repeats + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                taken[name].append(time.perf_counter() - start)
    best = {name: min(seconds[1:]) for name, seconds in taken.items()}
    return {**best, "grid / full": best["grid"] / best["full"]}


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Part ``sampling``."""
    import anndata as ad
    import numpy as np

    adata = ad.read_h5ad(find_data(options.data_dir) / "starmap3d_visual_cortex.h5ad")
    adata.obs["slice_id"] = "one"
    model = train(adata, LONG, n_steps=2)["model"]
    query = adata.copy()
    hidden = np.random.default_rng(0).permutation(query.n_obs)[: query.n_obs // 2]
    query.obsm["spatial"] = query.obsm["spatial"].astype(float)
    query.obsm["spatial"][hidden] = np.nan
    start = time.perf_counter()
    placed = model.sample(query, mode="expr_to_pos", inpaint=True, random_state=0)
    seconds = time.perf_counter() - start
    assert np.isfinite(placed.obsm["spatial_reconstructed"]).all()
    return {"seconds": seconds, "process": peak_bytes(), "n_cells": query.n_obs}


MEASURES = {"steps": step, "estimates": estimate, "operations": operation, "sampling": sampling}


def runs(parts: Sequence[str], n_steps: int, repeats: int) -> list[tuple[str, str, int, dict[str, Any]]]:
    """Part, setting, cells, and other parameters of every run."""
    every: list[tuple[str, str, int, dict[str, Any]]] = [("steps", name, n, {"steps": n_steps}) for name, n in STEPS]
    every += [("estimates", name, n, {}) for name, (_, n, _) in ESTIMATED.items()]
    every += [("operations", "", WHOLE, {"repeats": repeats}), ("sampling", "default", 0, {})]
    return [run for run in every if run[0] in parts]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_context", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--measure", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--setting", default="", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def measure(part: str, setting: str, n_cells: int, options: argparse.Namespace, folder: Folder) -> dict[str, Any]:
    """One run in a new process."""
    arguments = ["--measure", part, "--setting", setting, "--steps", options.steps, "--repeats", options.repeats]
    arguments += ["--data-dir", options.data_dir] if options.data_dir else []
    if part in ("steps", "estimates"):
        file = folder / f"{n_cells}.h5ad"
        if not file.exists():
            make_slice(n_cells, GENES).write_h5ad(file)
        arguments += ["--file", file]
    environment = None if part == "operations" else RETURN_MEMORY  # which slows down allocations
    return in_fresh_process("benchmarks.long_context", *arguments, environment=environment)


def report(results: Results) -> dict[str, Any]:
    """Ratios between sizes, and a table of all runs."""
    found = {(entry["method"], entry["fold"], entry["seed"]): entry["scores"] for entry in results.entries}
    ratios = {
        name: {key: found["steps", name, LARGE][key] / found["steps", name, SMALL][key] for key in ("peak", "seconds")}
        for name in SETTINGS
        if ("steps", name, LARGE) in found and ("steps", name, SMALL) in found
    }
    lines = [["part", "setting", "cells", "measured"]]
    for (part, name, n), scores in found.items():
        text = ", ".join(f"{key} {value:.3g}" for key, value in scores.items())
        lines.append([part, name, f"{n:,}", text])
    for name, ratio in ratios.items():
        lines.append(["ratio", name, f"{LARGE:,} / {SMALL:,}", ", ".join(f"{k} {v:.2f}" for k, v in ratio.items())])
    print(markdown(lines))
    return {"ratios": ratios}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure unfinished runs and print all."""
    options = parse(argv)
    if options.measure is not None:
        print(json.dumps(MEASURES[options.measure](options)))
        return
    results = Results(options.output, {"benchmark": "long_context", "genes": GENES})
    with tempfile.TemporaryDirectory() as folder:
        for part, setting, n_cells, parameters in runs(options.parts, options.steps, options.repeats):
            identity: dict[str, Any] = {"method": part, "fold": setting, "seed": n_cells}
            if results.find(parameters, **identity) is None:
                scores = measure(part, setting, n_cells, options, Path(folder))
                results.add(parameters=parameters, scores=scores, **identity)
    results.write(**report(results), machine=machine())


if __name__ == "__main__":
    main()
