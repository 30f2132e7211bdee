"""Placement of dissociated cells, judged by genes that no method reads; see ``_dissociated.py`` for the score and the data.

Every quarter of the genes is held out in turn. Placements: AlphaSTomics (``tl.reconstruct``, of all cells as one tissue, and with
``independent=True``), the position of the reference cell with the largest Pearson or Spearman correlation (as DistMap, Karaiskos et
al. 2017, and novoSpaRc start), the position around which the Pearson correlation is largest, Tangram (``peers/tangram.py``, in an
environment of its own), and chance. Transfers without a position: ``tl.impute``, and nearest reference cells in expression. Run as
``python -m benchmarks.dissociated``; finished runs are kept.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import _dissociated as cells, _models, peers
from benchmarks._report import Results, markdown, mean_sd, summarize
from benchmarks._runner import RESULTS
from benchmarks.peers._environment import PEER_DIR, PeerError, environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from benchmarks._dissociated import Fold

PLAIN: dict[str, Callable[..., NDArray[np.float64]]] = {
    "chance": cells.chance,
    "pearson_argmax": cells.pearson_argmax,
    "spearman_argmax": cells.spearman_argmax,
    "pearson_mode": cells.pearson_mode,
    "direct_transfer": cells.direct_transfer,
}
SEEDED = ("chance", "alphastomics")  # the others are run with the first seed, which breaks ties or starts Tangram
METHODS = (*PLAIN, "tangram", "alphastomics")
OURS = ("alphastomics", "alphastomics_independent", "alphastomics_impute")
MODE = "expr_to_pos"  # half of the time of a model for all modes
LINES = (*PLAIN, *peers.PEERS["tangram"].methods, *OURS)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dissociated", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=list(cells.DATA), default=list(cells.DATA))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS / "dissociated.json")
    parser.add_argument("--model-dir", type=Path, help="folder in which trained models are saved and reused")
    parser.add_argument("--peer-dir", type=Path, default=PEER_DIR, help="folder of the environment of Tangram")
    parser.add_argument("--peer-minutes", type=float, default=30.0, help="limit of time of Tangram on a fold")
    parser.add_argument(
        "--data-dir", help="folder of the .h5ad files and of osmfish/; default $ALPHASTOMICS_DATA or ../shared/data"
    )
    return parser.parse_args(argv)


def run_plain(fold: Fold, method: str, seed: int) -> dict[str, dict[str, float]]:
    """Scores of a method without training."""
    result = PLAIN[method](fold, seed=seed)
    return {method: fold.judge_values(result) if method == "direct_transfer" else fold.judge_places(result)}


def run_tangram(fold: Fold, seed: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Scores of the most probable reference cell and of the mean position."""
    peer = peers.PEERS["tangram"]
    python = environment(options.peer_dir / "tangram", peer.requirements)
    placed = peers.place(peer, python, fold.reference, fold.query, seed=seed, minutes=options.peer_minutes)
    return {method: fold.judge_places(placed[method]) for method in peer.methods}


def run_ours(fold: Fold, seed: int, model_dir: Path | None) -> dict[str, dict[str, float]]:
    """Scores of the two placements of ``tl.reconstruct`` and of the cells that ``tl.impute`` compares."""
    import alphastomics as asx
    from alphastomics.tl._neighbors import nearest_cells

    path = _models.model_path(model_dir, *fold.name.split(", "), mode=MODE, seed=seed)
    model, _ = _models.train_or_load(fold.reference, seed=seed, minutes=None, mode=MODE, path=path)
    with _models.adapted(model, fold.query):
        query, independent = (
            asx.tl.reconstruct(fold.query, model=model, copy=True, random_state=seed, independent=independent)
            for independent in (False, True)
        )
    near = nearest_cells(fold.query, fold.reference, model, cells.N_NEIGHBORS)
    return {
        "alphastomics": fold.judge_places(query.obsm["spatial_reconstructed"]),
        "alphastomics_independent": fold.judge_places(independent.obsm["spatial_reconstructed"]),
        "alphastomics_impute": fold.judge_values(fold.shown[near].mean(1)),
    }


def run(results: Results, fold: Fold, method: str, seed: int, options: argparse.Namespace) -> None:
    """Run a method on a fold, unless it is finished; a failure of Tangram is printed."""
    parameters: dict[str, Any] = {"n_neighbors": cells.N_NEIGHBORS}
    if method == "tangram":
        parameters |= peers.PEERS[method].parameters
    if results.find(parameters, method=method, fold=fold.name, seed=seed) is not None:
        return
    start = time.perf_counter()
    if method == "alphastomics":
        lines = run_ours(fold, seed, options.model_dir)
    elif method == "tangram":
        try:
            lines = run_tangram(fold, seed, options)
        except PeerError as error:
            print(f"{fold.name}, seed {seed}, {method}: {error}", flush=True)
            return
    else:
        lines = run_plain(fold, method, seed)
    seconds = round(time.perf_counter() - start, 1)
    for name, scores in reversed(lines.items()):  # the one that marks the run as finished is last
        results.add(method=name, fold=fold.name, seed=seed, parameters=parameters, scores=scores, seconds=seconds)
        print(f"{fold.name}, seed {seed}, {name}: {scores} ({seconds:.0f} s)", flush=True)


def table(summary: dict[str, dict[str, dict[str, Any]]]) -> str:
    """AUC of every data set and method, and the error where positions are known."""
    lines = [["data", "method", "auc", "error", "seeds"]]
    for data, methods in summary.items():
        for name, line in methods.items():
            error = mean_sd(*line["error"]) if "error" in line else ""
            lines.append([data, name, mean_sd(*line["auc"]), error, str(line["n_seeds"])])
    return markdown(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run unfinished methods and print the table."""
    options = parse(argv)
    results = Results(options.output, {"benchmark": "dissociated"})
    for data in options.data:
        folds = cells.DATA[data](options.data_dir)
        for seed in options.seeds:
            for method in options.methods:
                for fold in folds:
                    if seed == options.seeds[0] or method in SEEDED:
                        run(results, fold, method, seed, options)
    names = [f"genes {number}" for number in range(cells.N_FOLDS)]
    summary = {
        data: summarize(results.entries, LINES, [f"{data}, {name}" for name in names], options.seeds)
        for data in cells.DATA
    }
    results.write(summary=summary)
    print(table(summary), flush=True)


if __name__ == "__main__":
    main()
