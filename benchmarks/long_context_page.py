"""The tables of ``docs/long-context.md``, from the committed results: ``python -m benchmarks.long_context_page`` prints them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks._report import mean_sd
from benchmarks._runner import RESULTS
from benchmarks.ingredients import VARIANTS
from benchmarks.long_context import ESTIMATED, LARGE, RECOMPUTED, SETTINGS, SMALL, WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

CLAIMS = {
    "factors": "low-rank pair features",
    "chunked loss": "distance loss in blocks",
    "sparse pairs": "pair features of 32 neighbors",
    "axial pairs": "axial attention on factors",
    "axial cells": "grid attention over cells",
    "mixed precision memory": "bfloat16, memory",
    "mixed precision time": "bfloat16, time",
}
TISSUES = {
    "seqfish": "seqFISH mouse embryo, slices of 10,129 and 7,642 cells",
    "starmap3d": "STARmap visual cortex in 3D, one slice of 16,422 cells",
}
SCORES = {
    "knn_20": "kNN preservation ↑",
    "distance_spearman": "distance Spearman ↑",
    "contact_5": "contact precision ↑",
    "aligned_rmsd": "aligned RMSD ↓",
}
CHAINS = {
    "fape": "FAPE ↓",
    "fape_mirrored": "FAPE of the mirror image",
    "distance_spearman": "distance Spearman ↑",
    "rmsd": "RMSD, Å ↓",
    "bond": "bond length, Å (3.8)",
}
GIB = 2**30


def rows(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first line is the header, and all columns but the first are right-aligned."""
    head, *body = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([head, "| --- |" + " ---: |" * (len(lines[0]) - 1), *body])


def times(ratio: float) -> str:
    """A ratio with three significant digits, or all digits before the point."""
    return f"{ratio:.0f} ×" if ratio >= 1000 else f"{ratio:.2g} ×" if ratio < 1 else f"{ratio:.3g} ×"


def claims_table(folder: Path = RESULTS) -> str:
    """Claims of the specification, arithmetic, and measurements."""
    found = json.loads((folder / "claims.json").read_text())
    lines = [["claim", "specification", "arithmetic", "measured"]]
    for name, title in CLAIMS.items():
        claim = found["claims"][name]
        lines.append([title, *(times(claim[key]) for key in ("specification", "arithmetic", "ratio"))])
    for name, measured in found["sharing"]["measured"].items():
        ratio = times(found["sharing"]["specification"][name])
        text = f"{times(measured['shared'])}; all weights {times(measured['all'])}"
        lines.append([f'`layer_sharing="{name}"`, weights', ratio, ratio, text])
    return rows(lines)


def steps_table(folder: Path = RESULTS) -> str:
    """A step of training by the number of cells in its context."""
    scores = _by_run(folder)
    lines = [["training step", *(f"{n:,} cells" for n in (SMALL, LARGE, WHOLE)), "time ×", "memory ×"]]
    for name in SETTINGS:
        found = [scores.get(("steps", name, n)) for n in (SMALL, LARGE, WHOLE)]
        if found[0] is None or found[1] is None:
            continue
        small, large = found[0], found[1]
        cells = [f"{run['seconds']:.1f} s, {run['peak'] / GIB:.2f} GiB" if run else "" for run in found]
        ratios = [f"{large[key] / small[key]:.2f}" for key in ("seconds", "peak")]
        lines.append(["neighbor, pairs" if name == "default" else name, *cells, *ratios])
    if run := scores.get(("steps", RECOMPUTED, WHOLE)):
        whole = f"{run['seconds']:.1f} s, {run['peak'] / GIB:.2f} GiB"
        lines.append(["neighbor, pairs, all blocks recomputed", "", "", whole, "", ""])
    return rows(lines)


def others_table(folder: Path = RESULTS) -> str:
    """Single operations, and sampling of a slice."""
    scores = _by_run(folder)
    operations = scores["operations", "", WHOLE]
    lines = [
        ["", "measured"],
        [f"32 nearest neighbors of {WHOLE:,} cells", f"{operations['nearest cells']:.2f} s"],
        [f"grid attention relative to full attention, {SMALL:,} cells", times(operations["grid / full"])],
    ]
    if run := scores.get(("sampling", "default", 0)):
        half = f"placement of half of the {run['n_cells']:,} cells of a 3D slice"
        lines.append([half, f"{run['seconds']:.0f} s, {run['process'] / GIB:.1f} GiB of the process"])
    return rows(lines)


def estimates_table(folder: Path = RESULTS) -> str:
    """Estimated and measured memory of a step."""
    scores = _by_run(folder)
    lines = [["training step", "cells", "blocks recomputed", "estimate", "measured", "ratio"]]
    for name, (_, n, recompute) in ESTIMATED.items():
        run = scores["estimates", name, n]
        sizes = [f"{run[key] / GIB:.2f} GiB" for key in ("estimate", "peak")]
        lines.append([name.removesuffix(", recomputed"), f"{n:,}", recompute, *sizes, f"{run['ratio']:.2f}"])
    return rows(lines)


def ingredients_table(name: str, folder: Path = RESULTS) -> str:
    """Effect of each component on accuracy, time and memory; empty without measurements."""
    path = folder / f"{name}.json"
    if not path.is_file():
        return ""
    results = json.loads(path.read_text())
    summary = results["summary"]
    read_outs = list(dict.fromkeys(row.rpartition(", ")[2] for row in summary))
    titles = [f"{title}, {name}" for title in SCORES.values() for name in read_outs]
    lines = [["", *titles, "steps", "s per step", "GiB"]]
    for variant in VARIANTS:
        found = [summary.get(f"{variant}, {read_out}") for read_out in read_outs]
        if None not in found:
            scores = [mean_sd(*run[score]) for score in SCORES for run in found]
            costs = [
                f"{found[0][cost][0]:{form}}" for cost, form in (("n_steps", ".0f"), ("step", ".2g"), ("peak", ".2g"))
            ]
            lines.append([variant, *scores, *costs])
    minutes, steps = (
        max(entry["parameters"][key] or 0 for entry in results["entries"]) for key in ("minutes", "steps")
    )
    length = f"{minutes:g} minutes" if minutes else f"{steps} steps"
    seeds = max(found["n_seeds"] for found in summary.values())
    heading = f"{TISSUES[results['tissue']]}; {length} of training each" + (f", {seeds} seeds" if seeds > 1 else "")
    return f"{heading}:\n\n{rows(lines)}"


def chains_table(folder: Path = RESULTS) -> str:
    """Chains of residues with and without their order; empty without measurements."""
    path = folder / "chains.json"
    if not path.is_file():
        return ""
    summary = json.loads(path.read_text())["summary"]
    lines = [["", *CHAINS.values()]]
    lines += [[method, *(mean_sd(*found[score]) for score in CHAINS)] for method, found in summary.items()]
    seeds = max(found["n_seeds"] for found in summary.values())
    return f"Held-out chains, {seeds} seed{'s' if seeds > 1 else ''}:\n\n{rows(lines)}"


def tables(folder: Path = RESULTS) -> Iterator[str]:
    """All tables."""
    yield steps_table(folder)
    yield others_table(folder)
    yield estimates_table(folder)
    yield claims_table(folder)
    measured = [ingredients_table(name, folder) for name in ("whole_slices", *(f"ingredients_{t}" for t in TISSUES))]
    yield from filter(None, [*measured, chains_table(folder)])


def _by_run(folder: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    entries = json.loads((folder / "long_context.json").read_text())["entries"]
    return {(entry["method"], entry["fold"], entry["seed"]): entry["scores"] for entry in entries}


if __name__ == "__main__":
    print("\n\n".join(tables()))
