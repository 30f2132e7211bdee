r"""Whether draws of positions are samples of the posterior.

A draw d and the truth x of the same cells are two samples of one distribution. For every score S of ``_placement.py`` the mean of
:math:`S(x, d)` over draws (column ``S, truth``) is therefore compared with the mean of :math:`S(d, d')` over pairs of draws
(``S, draws``), and ``S, ratio`` is the second over the first, 1 for a calibrated model. The other scores, with the
conditional mean m (``reduce="mean"``), after a rigid motion of the truth onto m:

- ``smooth, error``, ``rough, error``: root mean square over cells of the error x - m averaged over the 20 cells nearest in m, which
  they share, and of the rest; ``smooth, draws``, ``rough, draws``: the same of d - m. Distances are relative to the root mean square
  radius of the truth;
- ``spread_over_error``: root mean square of d - m over that of x - m;
- ``coverage``: share of the cells with :math:`\lVert x - m \rVert` at most the eighth smallest of nine
  :math:`\lVert d - m \rVert`, .8 for a calibrated model;
- ``spearman``: rank correlation over cells of the root mean square of d - m with the error;
- ``energy``: energy score (Gneiting & Raftery 2007), :math:`\mathbb E \lVert d - x \rVert - \tfrac12 \mathbb E \lVert d - d' \rVert`,
  mean over cells, smaller is better.

Methods are ``placement`` and ``mean`` (scores of ``_placement.py``) and ``draws``. In three dimensions the first two also have
``rigid_rmsd``, the root mean square deviation after the best rotation and shift, without reflection and scale, relative to the
root mean square radius of the truth: units and mirror images count, smaller is better. Run as
``python -m benchmarks.calibration --benchmark seqfish --model-dir DIR``.
"""

from __future__ import annotations

import argparse
import time
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import spearmanr

from benchmarks import _held_out, _models, _placement
from benchmarks._data import BENCHMARKS, DEFAULT_MINUTES, find_data
from benchmarks._report import Results, summarize, table
from benchmarks._runner import RESULTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics
    from benchmarks._data import Fold

    Array = NDArray[np.float64]

N_DRAWS = 9
RANK = 8  # of nine distances: a region of 80 %
N_SHARED = 20  # cells over which a displacement is averaged
COMPARED = ("knn_20", "distance_spearman", "aligned_rmsd")
COLUMNS = (
    *(f"{score}, {what}" for score in COMPARED for what in ("truth", "draws", "ratio")),
    *("nn_ks", "smooth, error", "smooth, draws", "rough, error", "rough, draws"),
    *("spread_over_error", "coverage", "spearman", "energy"),
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.calibration", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--benchmark", choices=BENCHMARKS, default="seqfish", help="tissue")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, help="training time of a model; the default depends on the tissue")
    parser.add_argument("--mode", default=_models.MODE, choices=("any", "expr_to_pos"), help="mode of the models")
    parser.add_argument("--model-dir", type=Path, help="folder in which trained models are saved and reused")
    parser.add_argument("--output", type=Path, help="default benchmarks/results/calibration_BENCHMARK.json")
    parser.add_argument("--data-dir", help="folder of the .h5ad files; default $ALPHASTOMICS_DATA or ../shared/data")
    options = parser.parse_args(argv)
    options.minutes = options.minutes or DEFAULT_MINUTES[options.benchmark]
    options.output = options.output or RESULTS / f"calibration_{options.benchmark}.json"
    return options


def smooth_part(displacement: Array, position: Array) -> Array:
    """Mean displacement (N, D) of each cell and those nearest to it at ``position`` (N, D)."""
    n = min(N_SHARED, len(position) - 1)
    shared = np.column_stack([np.arange(len(position)), _placement.nearest_neighbors(position, n)])
    return displacement[shared].mean(1)


def rms(displacement: Array) -> float:
    """Root mean square length of displacements (..., D)."""
    return float(np.sqrt((displacement**2).sum(-1).mean()))


def moved(position: Array, target: Array) -> Array:
    """Position (N, D) after the rigid motion onto the target."""
    rotation, shift = _placement.rigid_fit(position, target)
    return position @ rotation + shift


def rigid_rmsd(truth: Array, predicted: Array) -> float:
    """Root mean square deviation after the best proper rotation and shift, over the root mean square radius of the truth.

    With centered X (prediction) and Y (truth) and the singular values s of XᵀY in descending order, the least squares residual
    is |X|² + |Y|² - 2 Σ d s, where d is 1, but det(XᵀY) / |det(XᵀY)| for the last value (Kabsch 1976).
    """
    x, y = predicted - predicted.mean(0), truth - truth.mean(0)
    u, s, vt = np.linalg.svd(x.T @ y)
    s[-1] *= np.sign(np.linalg.det(u) * np.linalg.det(vt))
    norm = float((y**2).sum())
    return float(np.sqrt(max(0.0, (x**2).sum() + norm - 2 * s.sum()) / norm))


def compare(draws: Array, mean: Array, truth: Array) -> dict[str, float]:
    """Scores of draws (K, N, D) around a mean (N, D)."""
    with_truth = [_placement.score(truth, draw) for draw in draws]
    between = [_placement.score(draws[i], draws[j]) for i, j in combinations(range(len(draws)), 2)]
    scores = {"nn_ks": float(np.mean([each["nn_ks"] for each in with_truth]))}
    for name in COMPARED:
        a, b = (float(np.mean([each[name] for each in group])) for group in (with_truth, between))
        scores |= {f"{name}, truth": a, f"{name}, draws": b, f"{name}, ratio": b / a}
    radius = rms(truth - truth.mean(0))
    error = (moved(truth, mean) - mean) / radius
    spread = np.stack([moved(draw, mean) - mean for draw in draws]) / radius
    smooth_error, smooth_spread = smooth_part(error, mean), np.stack([smooth_part(each, mean) for each in spread])
    length, lengths = np.linalg.norm(error, axis=-1), np.linalg.norm(spread, axis=-1)
    pairs = [np.linalg.norm(spread[i] - spread[j], axis=-1).mean() for i, j in combinations(range(len(draws)), 2)]
    return scores | {
        "smooth, error": rms(smooth_error),
        "smooth, draws": rms(smooth_spread),
        "rough, error": rms(error - smooth_error),
        "rough, draws": rms(spread - smooth_spread),
        "spread_over_error": rms(spread) / rms(error),
        "coverage": float((length <= np.sort(lengths, axis=0)[RANK - 1]).mean()),
        "spearman": float(spearmanr(np.sqrt((lengths**2).mean(0)), length).statistic),
        "energy": float(np.linalg.norm(spread - error, axis=-1).mean() - np.mean(pairs) / 2),
    }


def sample(model: AlphaSTomics, fold: Fold, seed: int) -> dict[str, tuple[Array, float]]:
    """Placement (N, D), mean (N, D) and draws (K, N, D) in the order of the truth, each with its seconds."""
    found = {}
    for method, arguments in {
        "placement": {}, "mean": {"n_samples": 2, "reduce": "mean"}, "draws": {"n_samples": N_DRAWS}
    }.items():  # fmt: skip
        start = time.perf_counter()
        cells = model.sample(fold.query.copy(), mode="expr_to_pos", random_state=seed, **arguments)
        seconds = time.perf_counter() - start
        positions = np.asarray(cells.obsm["spatial"]).reshape(-1, *fold.truth.shape)
        placed = np.stack([fold.in_source_order(each) for each in positions])
        found[method] = (placed if method == "draws" else placed[0], seconds)
    return found


def run(results: Results, fold: Fold, *, seed: int, options: argparse.Namespace) -> None:
    """Score the placement, the mean and the draws of one fold."""
    parameters = _models.training_parameters(options.minutes, mode=options.mode) | {"n_draws": N_DRAWS}
    methods = ("placement", "mean", "draws")
    if all(results.find(parameters, method=name, fold=fold.name, seed=seed) for name in methods):
        return
    path = _models.model_path(options.model_dir, options.benchmark, fold.name, mode=options.mode, seed=seed)
    model, train_seconds = _models.train_or_load(
        fold.reference, seed=seed, minutes=options.minutes, mode=options.mode, path=path
    )
    perturbation = model.fitted_.perturbation
    found = sample(model, fold, seed)
    for method, (positions, seconds) in found.items():
        if method == "draws":
            scores = compare(positions, found["mean"][0], fold.truth)
        else:
            scores = _placement.score(fold.truth, positions)
            if fold.truth.shape[1] == 3:
                scores["rigid_rmsd"] = rigid_rmsd(fold.truth, positions)
        _held_out.keep(
            results, method, fold.name, seed, parameters=parameters, scores=scores, seconds=seconds,
            train_seconds=round(train_seconds, 1), model=_models.fingerprint(model),
            genes={"share": round(perturbation.share, 3), "offset": perturbation.offset},
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Score every unfinished fold and seed, and print the tables."""
    options = parse(argv)
    folds = BENCHMARKS[options.benchmark](find_data(options.data_dir))
    results = Results(options.output, {"benchmark": "calibration", "tissue": options.benchmark})
    for seed in options.seeds:
        for fold in folds:
            run(results, fold, seed=seed, options=options)
    rigid = ("rigid_rmsd",) if folds[0].truth.shape[1] == 3 else ()
    for methods, columns in (("placement", "mean"), (*_placement.METRICS, *rigid)), (("draws",), COLUMNS):
        summary = summarize(results.entries, methods, [fold.name for fold in folds], options.seeds)
        print(table(summary, columns))
    methods = ("placement", "mean", "draws")
    results.write(summary=summarize(results.entries, methods, [fold.name for fold in folds], options.seeds))


if __name__ == "__main__":
    main()
