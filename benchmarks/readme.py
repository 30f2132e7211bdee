"""The tables of the README and of three pages of ``docs/``, from the committed results: ``python -m benchmarks.readme`` prints them."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from benchmarks import _models, peers, unseen
from benchmarks._earlier import COMMIT, EARLIER, OURS
from benchmarks._report import markdown, mean_sd, summarize
from benchmarks._runner import RESULTS
from benchmarks.compare import printed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TISSUES = {
    "seqfish": "mouse embryo, seqFISH: another embryo",
    "seqfish_reverse": "the same embryos, exchanged",
    "starmap_mpfc": "mouse cortex, STARmap: another mouse (three folds)",
    "starmap_log": "the same, log-normalized",
    "hypothalamus": "mouse hypothalamus, MERFISH: another mouse",
    "hypothalamus_sections": "mouse hypothalamus, MERFISH: another section",
    "drosophila3d": "Drosophila embryo, 3D: other cells of the embryo",
    "starmap3d": "mouse cortex, STARmap, 3D: other cells of the block",
    "synthetic": "simulated anatomies (four)",
}
METHODS = {
    "alphastomics": "**AlphaSTomics**, `tl.reconstruct`",
    "not_adapted": "AlphaSTomics, not adapted to the query",
    "contrastive": "contrastive embedding, 10-NN",
    "distance_mlp": "MLP on distances",
    "optimal_transport": "entropic optimal transport",
    "knn_25": "25-NN in expression",
    "chance": "chance: permuted over all cells",
}
SCORES = {
    "distance_spearman": "distance Spearman ↑",
    "knn_20": "kNN preservation ↑",
    "contact_5": "contact precision ↑",
}
SHIFT_SCORES = ("distance_spearman", "knn_20")
CHANGES = {
    "depth": "a fifth of the depth",
    "gains": "gains of genes and cells",
    "panel": "60 % of the genes",
    "ambient": "10 % ambient counts",
    "all": "all of these",
    "composition": "one type ten times as frequent",
}
NETWORKS = {
    "unseen_quarter_keys": "default: four heads, a quarter of the keys",
    "unseen_expr_to_pos": 'the same, `mode="expr_to_pos"`',
    "unseen": "four heads",
    "unseen_two_heads": "two heads",
    "unseen_narrow_heads": "four heads of 16 channels",
    "unseen_rate": "two heads, learning rate of 1.5e-3",
    "unseen_relu": "two heads, ReLU",
    "unseen_feedforward_3d": "two heads, 3 d, learning rate of 1.5e-3",
    "unseen_four_heads_3d": "four heads, 3 d",
    "unseen_layers_3": "four heads, three blocks",
    "unseen_layers_2": "four heads, two blocks",
    "unseen_width_96": "width 96, two heads of 48 channels",
    "unseen_earlier": f"commit {COMMIT}",
}
"""File of the runs of each network, or of an earlier version."""
TIMED = {
    OURS: "**AlphaSTomics**, `tl.reconstruct`",
    EARLIER: f"`tl.reconstruct`, commit {COMMIT}",
    "contrastive": METHODS["contrastive"],
    "distance_mlp": METHODS["distance_mlp"],
}
KNOWN_TISSUES = {"seqfish": "mouse embryo", "hypothalamus": "hypothalamus"}
TIMED_TISSUES = KNOWN_TISSUES | {"starmap_mpfc": "mouse cortex"}
KNOWN = {
    ("mostly_known", "known, placement"): "**AlphaSTomics**, `tl.reconstruct(adata)`",
    ("mostly_known", "known, unconditioned"): "the same model, placing all cells",
    ("mostly_known", "known, alone"): "the same model, placing these cells only",
    ("mostly_known_model_of_another", "known, unconditioned"): "a model of another specimen, placing all cells",
    ("mostly_known", "known, nearest neighbors"): "25-NN in expression",
}
"""File and method of each row of the table of known positions."""
DISSOCIATED = {
    "osmfish": "osmFISH, sequenced cells",
    "osmfish_binary": "the same as 0 and 1",
    "drosophila_binary": "Drosophila, 0 and 1",
}
PLACED = {
    "alphastomics_independent": "**AlphaSTomics**, `independent=True`",
    "alphastomics": "AlphaSTomics, as one tissue",
    "tangram": "Tangram, most probable place",
    "tangram_mean": "Tangram, mean over places",
    "pearson_argmax": "largest Pearson correlation",
    "spearman_argmax": "largest Spearman correlation",
    "pearson_mode": "largest smoothed Pearson correlation",
    "chance": "chance",
    "alphastomics_impute": "`tl.impute`, no place",
    "direct_transfer": "direct transfer, no place",
}
PUBLISHED = {
    "alphastomics": "AlphaSTomics",
    "tangram": "Tangram, most probable",
    "tangram_mean": "Tangram, mean",
    "novosparc": "novoSpaRc",
    "celery": "CeLEry",
    "knn_25": "25-NN in expression",
    "chance": "chance",
}

PLANES = {"starmap_mpfc": "STARmap mouse cortex, three folds", "seqfish": "seqFISH mouse embryo"}
NEIGHBORS = ("reference neighbors", "known neighbors", "both neighbors")
QUESTIONS = (
    ("pos_to_expr", "expression at registered positions, Pearson ↑", "any, registered, mean", "pearson", (*NEIGHBORS[:1], "true layers")),
    ("pos_to_expr", "squared error over variance ↓", "any, registered, mean", "mse", (*NEIGHBORS[:1], "true layers")),
    ("pos_to_expr", "with 5 % of the cells observed, Pearson ↑", "any, known, mean", "pearson", (*NEIGHBORS, "all other cells")),
    ("pos_to_expr", "squared error over variance ↓", "any, known, mean", "mse", (*NEIGHBORS, "all other cells")),
    ("pos_to_expr", "one sample, correlation of Moran's I ↑", "any, registered, sample", "moran", ("reference slices",)),
    ("pos_to_expr", "one sample, variance ratio", "any, registered, sample", "variance", ()),
    ("pos_to_expr", "with 5 % of the cells observed, correlation of Moran's I ↑", "any, known, sample", "moran", ("reference slices",)),
    ("gene_inpainting", "30 % of the genes hidden, Pearson ↑", "genes, any", "pearson", (
        "genes, space", "genes, expression", "genes, cell type", "genes, cell type, predicted")),
    ("gene_inpainting", "30 % of the entries hidden, Pearson ↑", "entries, any", "pearson", (
        "entries, space", "entries, expression", "entries, cell type", "entries, cell type, predicted")),
    ("joint", "classifier of sampled and held-out slices, AUC ↓", "sample", "auc", (
        "reference, mean", "reference, nearest")),
    ("embeddings", "cell types, layer `transformer` (default), k-means ARI ↑", "transformer", "type_ari", ("PCs",)),
    ("embeddings", "k-means NMI ↑", "transformer", "type_nmi", ("PCs",)),
    ("embeddings", "cell types, both layers, k-means ARI ↑", "all", "type_ari", ("PCs",)),
    ("embeddings", "k-means NMI ↑", "all", "type_nmi", ("PCs",)),
    ("embeddings", "cell types, both layers, Louvain ARI ↑", "all", "type_ari_louvain", ("PCs",)),
    ("embeddings", "Louvain NMI ↑", "all", "type_nmi_louvain", ("PCs",)),
    ("embeddings", "cortical layers, both layers of the model, k-means ARI ↑", "all", "layer_ari", ("PCs",)),
    ("embeddings", "k-means NMI ↑", "all", "layer_nmi", ("PCs",)),
    ("uncertainty", "uncertainty of positions, Spearman with the error ↑", "position, mean", "spearman", ()),
    ("uncertainty", "coverage of 80 % regions", "position, mean", "coverage", ()),
    ("uncertainty", "uncertainty of medoids, Spearman with the error ↑", "position, medoid", "spearman", ()),
    ("uncertainty", "coverage of 80 % regions", "position, medoid", "coverage", ()),
    ("uncertainty", "uncertainty of log expression, Spearman with the error ↑", "expression, log1p", "spearman", ()),
    ("uncertainty", "coverage of 80 % intervals", "expression, log1p", "coverage", ()),
    ("uncertainty", '`layers["sd"]`, Spearman with the error ↑', 'expression, layers["sd"]', "spearman", ()),
    ("uncertainty", "coverage of 80 % intervals", 'expression, layers["sd"]', "coverage", ()),
    ("directions", "placement, distance Spearman ↑", "any, placed", "distance_spearman", ("expr_to_pos, placed",)),
    ("directions", "placement, kNN preservation ↑", "any, placed", "knn_20", ("expr_to_pos, placed",)),
    ("directions", "placement, contact precision ↑", "any, placed", "contact_5", ("expr_to_pos, placed",)),
    ("directions", "predicted expression, Pearson ↑", "any, mean", "pearson", ("pos_to_expr, mean",)),
    ("directions", "one sample, correlation of Moran's I ↑", "any, sample", "moran", ("pos_to_expr, sample",)),
)  # fmt: skip
CALIBRATED = {
    "seqfish": "seqFISH, another embryo",
    "starmap_mpfc": "STARmap, another mouse (three folds)",
    "drosophila3d": "Drosophila, other cells of the embryo",
    "hypothalamus": "MERFISH hypothalamus, another animal",
}
PAIRED = {
    "kNN preservation: truth, draws": ("knn_20, truth", "knn_20, draws"),
    "distance Spearman": ("distance_spearman, truth", "distance_spearman, draws"),
    "aligned RMSD": ("aligned_rmsd, truth", "aligned_rmsd, draws"),
    "shared displacement: error, draws": ("smooth, error", "smooth, draws"),
    "rest": ("rough, error", "rough, draws"),
    "coverage of 80 % regions": ("coverage",),
    "Spearman of spread and error": ("spearman",),
}
NAMED = {
    "expr_to_pos, placed": 'a model with `mode="expr_to_pos"`',
    "pos_to_expr, mean": 'a model with `mode="pos_to_expr"`',
    "pos_to_expr, sample": 'a model with `mode="pos_to_expr"`',
    "known neighbors": "observed neighbors",
}


def tissue_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Scores of AlphaSTomics in every tissue, mean ± standard deviation over seeds, with those of the best other method."""
    others = (*unseen.BASELINES, *peers.METHODS)
    lines = [["placed tissue", *SCORES.values()]]
    for tissue, title in TISSUES.items():
        folds = list(
            dict.fromkeys(
                e["fold"] for e in entries if e["fold"].startswith(f"{tissue}, ") and e["fold"].count(", ") == 1
            )
        )
        summary = summarize(entries, [_models.DEFAULT, *others], folds, unseen.SEEDS)
        best = {score: max(summary[name][score][0] for name in others if name in summary) for score in SCORES}
        lines.append(
            [title, *(f"**{mean_sd(*summary[_models.DEFAULT][score])}** ({best[score]:.3f})" for score in SCORES)]
        )
    return markdown(lines)


def rank_table(ranks: Mapping[str, float]) -> str:
    """Mean rank of every method over tissues and scores."""
    named = [[title, f"{ranks[name]:.1f}"] for name, title in METHODS.items() if name in ranks]
    return markdown([["method", "mean rank"], *named])


def fold_table(entries: Sequence[Mapping[str, Any]], ratios: Mapping[str, Mapping[str, float]]) -> str:
    """Scores of AlphaSTomics in every fold, with those of the best other method, and the mean of their ratios."""
    lines, unchanged = [["fold", *SCORES.values()]], [fold for fold in ratios if fold.count(", ") == 1]
    for fold in sorted(unchanged, key=lambda fold: list(TISSUES).index(fold.partition(", ")[0])):
        summary = summarize(entries, [_models.DEFAULT], [fold], unseen.SEEDS)[_models.DEFAULT]
        cells = [
            f"{mean_sd(*summary[score])} ({summary[score][0] / ratios[fold][score]:.3f}, {ratios[fold][score]:.3f} ×)"
            for score in SCORES
        ]
        lines.append([fold, *cells])
    lines.append(["mean ratio", *(f"{np.mean([ratios[fold][score] for fold in unchanged]):.3f} ×" for score in SCORES)])
    return markdown(lines)


def network_table(folder: Path = RESULTS) -> str:
    """Scores of AlphaSTomics with other networks, means over seeds, in every fold in which several were run."""
    runs = {
        title: json.loads(path.read_text())["entries"]
        for name, title in NETWORKS.items()
        if (path := folder / f"{name}.json").is_file()
    }
    folds = dict.fromkeys(entry["fold"] for entries in runs.values() for entry in entries)
    lines = [["fold", "network", "seeds", *SCORES.values()]]
    for fold in folds:
        found = {title: summarize(entries, [OURS, EARLIER], [fold], unseen.SEEDS) for title, entries in runs.items()}
        rows = {title: next(iter(summary.values())) for title, summary in found.items() if summary}
        if len(rows) > 1:
            lines += [
                [fold, title, str(row["n_seeds"]), *(f"{row[score][0]:.3f}" for score in SCORES)]
                for title, row in rows.items()
            ]
    return markdown(lines)


def shift_table(entries: Sequence[Mapping[str, Any]], tissue: str = "seqfish, embryo2_z2") -> str:
    """Scores of changed queries, their ceilings, and the ratio of the two."""
    lines = [["change", *(SCORES[score] for score in SHIFT_SCORES)]]
    for name, title in CHANGES.items():
        ceiling = f"{tissue}, others" if name == "composition" else f"{tissue}, {name}, ceiling"
        found = [
            summarize(entries, [_models.DEFAULT], [fold], unseen.SEEDS).get(_models.DEFAULT)
            for fold in (f"{tissue}, {name}", ceiling)
        ]
        if found[0] is None:
            continue
        pairs = [[line and line[score][0] for line in found] for score in SHIFT_SCORES]
        lines.append(
            [title, *(f"{ours:.3f}" + (f" of {best:.3f}, {ours / best:.3f} ×" if best else "") for ours, best in pairs)]
        )
    return markdown(lines)


def dissociated_table(summary: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """AUC of the hidden genes for every method and data set."""
    lines = [["method", *(DISSOCIATED[data] for data in summary)]]
    for name, title in PLACED.items():
        found = [methods[name]["auc"] if name in methods else None for methods in summary.values()]
        lines.append([title, *(mean_sd(*auc) if auc else "" for auc in found)])
    return markdown(lines)


def known_table(folder: Path = RESULTS) -> str:
    """Scores of a fifth of the cells of a slice whose other positions are known, by tissue."""
    lines = [["positions of a fifth of the cells", *SCORES.values()]]
    for tissue, title in KNOWN_TISSUES.items():
        for (run, method), name in KNOWN.items():
            path = folder / f"{run}_{tissue}.json"
            summary = json.loads(path.read_text())["summary"][method]
            lines.append([f"{title}: {name}", *(mean_sd(*summary[score]) for score in SCORES)])
    return markdown(lines)


def time_table(folder: Path = RESULTS) -> str:
    """Distance Spearman and kNN preservation after each time, by this version and the earlier one, and by baselines without a limit."""
    entries = json.loads((folder / "time_to_accuracy.json").read_text())["entries"]
    runs: dict[tuple[str, str, float | None], list[Mapping[str, float]]] = {}
    for entry in entries:
        tissue, minutes = entry["fold"].partition(", ")[0], entry["parameters"].get("minutes")
        runs.setdefault((tissue, entry["method"], minutes), []).append(entry["scores"])
    limits = sorted({minutes for *_, minutes in runs if minutes is not None})
    lines = [["placed tissue", "method", *(f"{limit:g} min" for limit in limits), "no limit"]]
    for tissue, title in TIMED_TISSUES.items():
        for method, name in TIMED.items():
            found = [runs.get((tissue, method, limit)) for limit in (*limits, None)]
            pairs = [
                scores and ", ".join(f"{np.mean([s[k] for s in scores]):.3f}" for k in SHIFT_SCORES) for scores in found
            ]
            lines.append([title, name, *(pair or "" for pair in pairs)])
    return markdown(lines)


def speed_table(folder: Path = RESULTS) -> str:
    """Time of this version relative to that of others."""
    ratios = json.loads((folder / "speed.json").read_text())["ratios"]
    names = list(ratios["step"])
    lines = [["time relative to", *(TIMED.get(name, "LUNA") for name in names)]]
    for task, title in (
        ("step", "training step, 2 × 512 cells, 351 genes"),
        ("placement", "placement of 12,000 cells"),
    ):
        lines.append([title, *(f"{ratios[task][name]:.2f}" if name in ratios[task] else "" for name in names)])
    return markdown(lines)


def peer_table(folder: Path = RESULTS) -> str:
    """Distance Spearman and kNN preservation of the published methods, in the folds in which one of them was run."""
    results, published = (
        json.loads((folder / f"{name}.json").read_text())["entries"] for name in ("unseen", "unseen_peers")
    )
    run = {entry["method"] for entry in published}
    shown = [name for name in PUBLISHED if name in run or name not in peers.METHODS]
    lines = [["fold", *(PUBLISHED[name] for name in shown)]]
    for fold in dict.fromkeys(entry["fold"] for entry in published):
        summary = summarize([*results, *published], shown, [fold], unseen.SEEDS)
        pairs = [[summary[name][score][0] for score in SHIFT_SCORES] if name in summary else () for name in shown]
        lines.append([fold, *(", ".join(f"{value:z.3f}" for value in pair) for pair in pairs)])
    return markdown(lines)


def result_tables(folder: Path = RESULTS) -> list[str]:
    """Tables of unseen tissue, changed queries, dissociated cells, known positions and time in ``docs/results.md``."""
    results, published, dissociated = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("unseen", "unseen_peers", "dissociated")
    )
    return [
        fold_table([*results["entries"], *published["entries"]], results["ratios"]),
        shift_table(results["entries"]),
        dissociated_table(dissociated["summary"]),
        known_table(folder),
        time_table(folder),
        speed_table(folder),
    ]


def lever_table(folder: Path = RESULTS) -> str:
    """Scores of every way to place cells, means over the folds in which all ways are finished, and its mean rank."""
    found = json.loads((folder / "levers.json").read_text())
    entries, ranks = found["entries"], found["ranks"]
    done = Counter(entry["fold"] for entry in entries)
    seeds = sorted({entry["seed"] for entry in entries})
    folds = [fold for fold in done if done[fold] == len(ranks) * len(seeds)]
    lines = [["way", *SCORES.values(), "mean rank"]]
    for row, rank in ranks.items():
        scores = summarize(entries, [row], folds, seeds)[row]
        lines.append([row, *(f"{scores[score][0]:.3f}" for score in SCORES), f"{rank:.1f}"])
    return markdown(lines)


def tables(folder: Path = RESULTS) -> str:
    """Both tables of the README."""
    results, published = (json.loads((folder / f"{name}.json").read_text()) for name in ("unseen", "unseen_peers"))
    return f"{tissue_table([*results['entries'], *published['entries']])}\n\n{rank_table(results['ranks'])}"


def calibration_table(folder: Path = RESULTS) -> str:
    """Draws of positions compared with the truth and with each other, and their spread with the error; means over seeds."""
    lines = ["| tissue | " + " | ".join(PAIRED) + " |", "| --- |" + " ---: |" * len(PAIRED)]
    for name, title in CALIBRATED.items():
        draws = json.loads((folder / f"calibration_{name}.json").read_text())["summary"]["draws"]
        cells = [", ".join(f"{draws[score][0]:.3f}" for score in scores) for scores in PAIRED.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def named_row(row: str) -> str:
    """Name of a row."""
    return NAMED.get(row, row.removeprefix("genes, ").removeprefix("entries, "))


def model_table(tissue: str, folder: Path = RESULTS) -> str:
    """Scores of one model of ``mode="any"`` and of other methods."""
    lines = ["| task | AlphaSTomics | compared with |", "| --- | ---: | --- |"]
    seeds = 0
    for benchmark, question, method, score, others in QUESTIONS:
        path = folder / f"{benchmark}_{tissue}.json"
        summary = json.loads(path.read_text()).get("summary", {}) if path.is_file() else {}
        if score not in summary.get(method, {}):
            continue
        seeds = max(seeds, summary[method]["n_seeds"])
        named = [f"{mean_sd(*summary[other][score])} {named_row(other)}" for other in others if other in summary]
        lines.append(f"| {question} | {mean_sd(*summary[method][score])} | {'; '.join(named)} |")
    heading = f"{PLANES[tissue]}, {seeds} seed{'s' if seeds > 1 else ''}"
    return f"{heading}:\n\n" + "\n".join(lines)


def comparison(tissue: str, folder: Path = RESULTS) -> str:
    """Table of the configurations; empty without results."""
    path = folder / f"compare_{tissue}.json"
    if not path.is_file():
        return ""
    found = json.loads(path.read_text())
    minutes = max(run["settings"]["train"]["max_time"] for run in found["runs"]) / 60
    seeds = len({run["seed"] for run in found["runs"]})
    heading = (
        f"{PLANES[tissue].partition(',')[0]}, {minutes:g} min of training each, {seeds} seed{'s' if seeds > 1 else ''}"
    )
    return f"{heading}:\n\n{printed(pd.DataFrame.from_dict(found['summary'], orient='index'))}"


if __name__ == "__main__":
    print("\n\n".join([tables(), *result_tables(), peer_table(), network_table(), calibration_table(), lever_table()]))
    for name in PLANES:
        print(f"\n{model_table(name)}")
        print(f"\n{comparison(name)}")
