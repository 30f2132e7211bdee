"""Placement of tissue for which no default was chosen, and of queries from another instrument.

AlphaSTomics is trained with its default settings, without a limit of time. The folds are those of ``TISSUES``: from animal to animal in
both directions, also with log-normalized values (``starmap_log``), from section to section of an animal, other cells of the same specimen,
and simulated anatomies, one of them mirrored.
The queries of ``SHIFTED`` tissues are also changed as in ``_shifts.py``, and placed by the same models. Baselines have the arguments with
which they were published or chosen elsewhere.

``--ceilings`` also trains models of references that are changed like the query, which shows what the change itself costs; ``shares``
compares the scores of changed queries with these. ``not_adapted`` is the placement by a model that is not adapted to the query.

``--network`` changes the network, or the mode of the model, with an ``--output`` of its own.

``ratios`` compares AlphaSTomics with the best baseline of a fold, for three scores that are better when larger, means over seeds;
``ranks`` has the mean rank of every method over tissues and scores, 1 is best, without changed queries. A default of the package is
chosen by its mean rank. Run as ``python -m benchmarks.unseen --model-dir DIR``, or with other ``--methods``, ``--tissues`` and
``--seeds``; finished runs are kept.

Published methods (``peers/``) run only when named, as in ``--methods tangram novosparc celery --seeds 0 --no-shifts``. Their runs are
kept beside the others, in ``unseen_peers.json``, and count as baselines of the folds that they have finished. The version of the package
in ``_earlier.py`` also runs only when named, with an ``--output`` of its own.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import rankdata

from benchmarks import _models, peers
from benchmarks._data import BENCHMARKS, find_data
from benchmarks._earlier import EARLIER, run_earlier
from benchmarks._report import Results, markdown, summarize
from benchmarks._runner import RESULTS, run_plain, run_variants
from benchmarks._shifts import ceilings, shifted
from benchmarks.peers._environment import PEER_DIR

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks._data import Fold

TISSUES = tuple(BENCHMARKS)
SHIFTED = ("seqfish", "starmap_mpfc", "hypothalamus")  # counts of real tissue, from animal to animal
BASELINES = ("knn_25", "contrastive", "distance_mlp", "optimal_transport")
OURS = (_models.DEFAULT, "not_adapted")
METHODS = ("chance", *BASELINES, *OURS)
REPORTED = (*METHODS, *peers.METHODS)
COMPARED = ("distance_spearman", "knn_20", "contact_5")
SEEDS = (0, 1, 2)

Summary = dict[str, dict[str, dict[str, Any]]]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.unseen", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tissues", nargs="+", choices=TISSUES, default=list(TISSUES))
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, EARLIER, *peers.PEERS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--no-shifts", action="store_true", help="leave out the changed queries")
    parser.add_argument(
        "--ceilings",
        action="store_true",
        help="also place the changed queries by models of a reference with the same change",
    )
    parser.add_argument(
        "--network",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of AlphaSTomics as JSON, such as d_model=64",
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "unseen.json")
    parser.add_argument("--model-dir", type=Path, help="folder in which trained models are saved and reused")
    parser.add_argument(
        "--peer-dir", type=Path, default=PEER_DIR, help="folder of the environments of published methods"
    )
    parser.add_argument(
        "--peer-minutes", type=float, default=120.0, help="limit of time of a published method on a fold"
    )
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    return parser.parse_args(argv)


def queries(tissue: str, folder: Path, *, seed: int, shifts: bool, ceiling: bool) -> list[list[Fold]]:
    """Folds of a tissue in groups with the same reference, each with its changed queries; names begin with the tissue."""
    groups = []
    for fold in BENCHMARKS[tissue](folder):
        named = replace(fold, name=f"{tissue}, {fold.name}")
        groups.append([named, *(shifted(named, seed=seed) if shifts and tissue in SHIFTED else ())])
        if ceiling and tissue in SHIFTED:
            groups += [[each] for each in ceilings(named, seed=seed)]
    return groups


def summaries(entries: Sequence[Mapping[str, Any]], methods: Sequence[str], seeds: Sequence[int]) -> Summary:
    """Scores of every fold and method, mean and standard deviation over seeds."""
    folds = dict.fromkeys(entry["fold"] for entry in entries)
    return {fold: summarize(entries, methods, [fold], seeds) for fold in folds}


def ratios(summary: Summary) -> dict[str, dict[str, float]]:
    """Score of AlphaSTomics over that of the best baseline, for every fold that has both."""
    found = {}
    for fold, lines in summary.items():
        baselines = [lines[name] for name in (*BASELINES, *peers.METHODS) if name in lines]
        if baselines and _models.DEFAULT in lines:
            ours = lines[_models.DEFAULT]
            found[fold] = {s: ours[s][0] / max(line[s][0] for line in baselines) for s in COMPARED}
    return found


def shares(summary: Summary) -> dict[str, dict[str, float]]:
    """Score of AlphaSTomics for a changed query over that with a reference of the same change, for every fold that has both."""
    found = {}
    for fold, lines in summary.items():
        ceiling = summary.get(f"{fold}, ceiling", {})
        if _models.DEFAULT in lines and _models.DEFAULT in ceiling:
            ours, best = lines[_models.DEFAULT], ceiling[_models.DEFAULT]
            found[fold] = {s: ours[s][0] / best[s][0] for s in COMPARED}
    return found


def ranks(summary: Summary) -> dict[str, float]:
    """Mean rank of every method over tissues and scores; folds of one tissue are averaged, changed queries are left out."""
    folds = sorted(fold for fold in summary if fold.count(", ") == 1)
    methods = [name for name in REPORTED if folds and all(name in summary[fold] for fold in folds)]
    tissues = []
    for _, group in groupby(folds, lambda fold: fold.partition(", ")[0]):
        names = list(group)
        scores = [[np.mean([summary[f][m][s][0] for f in names]) for m in methods] for s in COMPARED]
        tissues.append(np.mean([rankdata(-np.asarray(row)) for row in scores], axis=0))
    return dict(zip(methods, np.mean(tissues, axis=0).tolist(), strict=True)) if methods else {}


def table(summary: Summary) -> str:
    """Scores of all folds and methods, means over seeds."""
    lines = [["fold", "method", *COMPARED]]
    lines += [
        [fold, method, *(f"{line[score][0]:.3f}" for score in COMPARED)]
        for fold, rows in summary.items()
        for method, line in rows.items()
    ]
    return markdown(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run unfinished methods and print the tables."""
    options = parse(argv)
    folder = find_data(options.data_dir)
    network = {name: json.loads(value) for name, _, value in (each.partition("=") for each in options.network)}
    results = Results(options.output, {"benchmark": "unseen"})
    published = Results(options.output.with_stem(f"{options.output.stem}_peers"), {"benchmark": "unseen"})
    for seed in options.seeds:
        for tissue in options.tissues:
            for group in queries(tissue, folder, seed=seed, shifts=not options.no_shifts, ceiling=options.ceilings):
                for fold in group:
                    for method in options.methods:
                        if method in peers.PEERS:
                            peers.run_peer(published, fold, method, seed, options.peer_dir, options.peer_minutes)
                        elif method == EARLIER:
                            run_earlier(results, fold, seed)
                        elif method not in OURS and not fold.name.endswith(", ceiling"):
                            run_plain(results, fold, method, seed)
                if variants := [method for method in OURS if method in options.methods]:
                    name = group[0].name.partition(", ")[2]
                    path = _models.model_path(
                        options.model_dir, tissue, name, mode=network.get("mode", _models.MODE), seed=seed
                    )
                    run_variants(results, group, variants, seed, path, **network)
    methods = [*options.methods, *(name for name in peers.METHODS if name not in options.methods)]
    summary = summaries([*results.entries, *published.entries], methods, options.seeds)
    written = published if set(options.methods) <= set(peers.PEERS) else results
    written.write(summary=summary, ratios=ratios(summary), shares=shares(summary), ranks=ranks(summary))
    print(table(summary))
    print("\nmean rank:", ", ".join(f"{name} {rank:.2f}" for name, rank in ranks(summary).items()), flush=True)


if __name__ == "__main__":
    main()
