"""The tables of README's section "Measured", from the committed results: ``python -m benchmarks.readme`` prints them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks import _ours
from benchmarks._report import mean_sd
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from pathlib import Path

TISSUES = {
    "seqfish": "seqFISH mouse embryo, one embryo → all 7,661 cells of a plane of another ({minutes:g} min of training)",
    "starmap_mpfc": "STARmap mouse cortex, two mice → the third, three folds ({minutes:g} min each)",
    "drosophila3d": "Drosophila embryo in 3D, half of the positions → the other half ({minutes:g} min)",
}
ROWS = {
    "alphastomics": "**AlphaSTomics**, `tl.reconstruct`",
    "chain_25": "AlphaSTomics, a draw of 25 steps",
    "medoid_8": "AlphaSTomics, medoid of 8 draws",
    "contrastive": "contrastive embedding, 10-NN",
    "distance_mlp": "perceptron on distances",
    "optimal_transport": "entropic optimal transport",
    "knn_25": "25-NN in expression",
    "knn_30_unscaled": "30-NN in expression, genes not standardised",
    "chance": "chance",
    "oracle": "shuffled within true cell types",
}
SCORES = {
    "knn_20": "20 neighbours kept ↑",
    "distance_spearman": "distance Spearman ↑",
    "contact_5": "contacts ↑",
    "aligned_rmsd": "aligned RMSD ↓",
    "nn_ks": "spacing KS ↓",
}


def tissue_table(summary: dict[str, Any]) -> str:
    """One benchmark as a Markdown table, mean ± standard deviation over seeds."""
    lines = ["| method | " + " | ".join(SCORES.values()) + " |", "| --- |" + " ---: |" * len(SCORES)]
    lines += [
        f"| {title} | " + " | ".join(mean_sd(*summary[row][score]) for score in SCORES) + " |"
        for row, title in ROWS.items()
        if row in summary
    ]
    return "\n".join(lines)


def tables(folder: Path = RESULTS) -> str:
    """All tables with their titles."""
    parts = []
    for name, title in TISSUES.items():
        results = json.loads((folder / f"{name}.json").read_text())
        minutes = {e["parameters"]["minutes"] for e in results["entries"] if e["method"] == _ours.DEFAULT}
        heading = title.format(minutes=max(minutes, default=0))
        parts.append(f"{heading}:\n\n{tissue_table(results['summary'])}")
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(tables())
