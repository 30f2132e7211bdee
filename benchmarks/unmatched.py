r"""Confidence of cells that the reference lacks, and of cells like those of the reference.

``left_out``: all cells of one type are left out of the reference, for every type with at least 100 cells in the query, one after
the other. Scores of the confidence c in the query:

- ``auc``: probability that a cell of the type has a smaller c than another cell;
- ``auc, distance``: the same for the distance to the fifth nearest reference cell in 20 principal components, which is not calibrated;
- ``found``: share of the cells of the type with c < .05;
- ``false``: share of the other cells with c < .05. Their animal is not in the reference.

Types of which no other cells differ cannot be found: "Ambiguous" cells of the hypothalamus are a mixture of all others.

``calibration``: share of the cells with c < .05 and < .25, ``low, 05`` and ``low, 25``, without any type left out: in a random half of the
cells of the reference, given the others (``half``); in another section of the same specimen (``section``); in the query, of another
animal (``animal``), with all its counts and with a fifth of them (``animal, depth``).

The confidence does not depend on the weights of the network, so that the statistic is fitted to the reference as after training, and
no network is trained. Run as ``python -m benchmarks.unmatched``; ``--tissues`` and ``--types`` select runs, and finished runs are kept.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sklearn.decomposition import PCA
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import NearestNeighbors

from benchmarks._data import find_data, labeled_folds
from benchmarks._held_out import keep
from benchmarks._report import Results, markdown
from benchmarks._runner import RESULTS
from benchmarks._shifts import thin

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

TISSUES = ("seqfish", "starmap_mpfc", "hypothalamus")
SECTIONS = {"seqfish": ("embryo1_z2", "embryo1_z5"), "hypothalamus": ("animal1_bregma-0.29", "animal1_bregma-0.09")}
MIN_CELLS = 100
LOW = 0.05
N_COMPONENTS, RANK = 20, 5  # of the distance
SCORES = ("auc", "auc, distance", "found", "false")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.unmatched", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tissues", nargs="+", choices=TISSUES, default=list(TISSUES))
    parser.add_argument("--types", nargs="+", help="types to leave out; all with at least 100 cells by default")
    parser.add_argument("--output", type=Path, default=RESULTS / "unmatched.json")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    return parser.parse_args(argv)


def confidence(reference: AnnData, query: AnnData) -> Array:
    """Confidence (n_query,) of the cells of a query, as ``sample`` of a model of the reference writes it."""
    from alphastomics.data import AnnDataSource, fit_schema
    from alphastomics.sampling._cells import content_order
    from alphastomics.sampling._confidence import fit_confidence_cells, measure_confidence

    schema = fit_schema(reference, slice_key="slice_id")
    cells = fit_confidence_cells(AnnDataSource(reference, schema, positions=True))
    assert cells is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of depth, which is changed on purpose
        source = AnnDataSource(query, schema, positions=False)
    found = np.empty(query.n_obs)
    for each in source.slices:
        rows = content_order(source, each.rows)
        found[rows] = measure_confidence(cells, source, rows)
    return found


def distance(reference: AnnData, query: AnnData) -> Array:
    """Distance (n_query,) to the fifth nearest reference cell in principal components of log-normalized counts."""
    median = float(np.median(reference.X.toarray().sum(1)))
    x, y = (
        np.log1p(counts * (median / np.maximum(counts.sum(1, keepdims=True), 1)))
        for counts in (reference.X.toarray(), query.X.toarray())
    )
    pca = PCA(N_COMPONENTS, svd_solver="covariance_eigh").fit(x)
    nearest = NearestNeighbors(n_neighbors=RANK, algorithm="brute").fit(pca.transform(x))
    return nearest.kneighbors(pca.transform(y))[0][:, -1]


def leave_out(reference: AnnData, query: AnnData, cell_type: str) -> dict[str, float]:
    """Scores of one type."""
    others = reference[(reference.obs["cell_type"] != cell_type).to_numpy()].copy()
    lacking = (query.obs["cell_type"] == cell_type).to_numpy()
    c = confidence(others, query)
    return {
        "auc": float(roc_auc_score(lacking, -c)),
        "auc, distance": float(roc_auc_score(lacking, distance(others, query))),
        "found": float((c[lacking] < LOW).mean()),
        "false": float((c[~lacking] < LOW).mean()),
    }


def unshifted(tissue: str, reference: AnnData, query: AnnData) -> Iterator[tuple[str, AnnData, AnnData]]:
    """Name, reference and query of each run without a type left out."""
    half = np.random.default_rng(0).permutation(reference.n_obs) < reference.n_obs // 2
    yield "half", reference[half].copy(), reference[~half].copy()
    if tissue in SECTIONS:
        first, second = ((reference.obs["slice_id"] == name).to_numpy() for name in SECTIONS[tissue])
        yield "section", reference[first].copy(), reference[second].copy()
    yield "animal", reference, query
    yield "animal, depth", reference, thin(query, np.random.default_rng(0))


def run(results: Results, tissue: str, fold: str, reference: AnnData, query: AnnData, types: Sequence[str]) -> None:
    """Run what is unfinished in a fold."""
    name, counts = f"{tissue}, {fold}", query.obs["cell_type"].value_counts()
    for cell_type in types or sorted(counts.index[counts >= MIN_CELLS]):
        parameters = {"left_out": cell_type}
        if counts.get(cell_type, 0) and results.find(parameters, method=cell_type, fold=name, seed=0) is None:
            start = time.perf_counter()
            scores = leave_out(reference, query, cell_type)
            seconds, n_cells = time.perf_counter() - start, int(counts[cell_type])
            keep(results, cell_type, name, 0, parameters=parameters, scores=scores, seconds=seconds, n_cells=n_cells)
    for method, known, cells in unshifted(tissue, reference, query):
        if results.find({}, method=method, fold=name, seed=0) is None:
            start = time.perf_counter()
            c = confidence(known, cells)
            scores = {"low, 05": float((c < LOW).mean()), "low, 25": float((c < 0.25).mean())}
            keep(results, method, name, 0, parameters={}, scores=scores, seconds=time.perf_counter() - start)


def summarize(entries: Sequence[Mapping]) -> dict[str, dict[str, float]]:
    """Mean and smallest AUC of every tissue, and means of the other scores over folds."""
    summary: dict[str, dict[str, float]] = {}
    for tissue in dict.fromkeys(entry["fold"].partition(", ")[0] for entry in entries):
        own = [entry for entry in entries if entry["fold"].startswith(f"{tissue}, ")]
        scores = [entry["scores"] for entry in own if "auc" in entry["scores"]]
        line: dict[str, float] = {"types": len(scores)}
        if scores:
            line |= {name: float(np.mean([each[name] for each in scores])) for name in SCORES}
            line["auc, smallest"] = min(each["auc"] for each in scores)
        for method in dict.fromkeys(entry["method"] for entry in own if "low, 05" in entry["scores"]):
            line[f"low, {method}"] = float(
                np.mean([entry["scores"]["low, 05"] for entry in own if entry["method"] == method])
            )
        summary[tissue] = line
    return summary


def table(summary: Mapping[str, Mapping[str, float]]) -> str:
    """The summary, one line per tissue."""
    names = list(dict.fromkeys(name for line in summary.values() for name in line))
    lines = [["tissue", *names]]
    lines += [[tissue, *(f"{line[n]:.3g}" if n in line else "" for n in names)] for tissue, line in summary.items()]
    return markdown(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run unfinished types and print the table."""
    options = parse(argv)
    folder, results = find_data(options.data_dir), Results(options.output, {"benchmark": "unmatched"})
    for tissue in options.tissues:
        for fold, (reference, query) in labeled_folds(tissue, folder).items():
            run(results, tissue, fold, reference, query, options.types)
    summary = summarize(results.entries)
    results.write(summary=summary)
    print(table(summary), flush=True)


if __name__ == "__main__":
    main()
