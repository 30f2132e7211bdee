r"""Whether draws of positions are samples of the posterior.

A draw d and the truth x of the same cells are two samples of one distribution. For every score S of ``_placement.py`` the mean of
:math:`S(x, d)` over draws (column ``S, truth``) is therefore compared with the mean of :math:`S(d, d')` over pairs of draws
(``S, draws``), and ``S, ratio`` is the second over the first, 1 for a calibrated model. The other scores, with the
conditional mean m (``reduce="mean"``), after a rigid motion of the truth onto m:

- ``smooth, error``, ``rough, error``: root mean square over cells of the error x - m averaged over the 20 cells nearest in m, which
  they share, and of the rest; ``smooth, draws``, ``rough, draws``: the same of d - m. Distances are relative to the root mean square
  radius of the truth;
- ``spread_over_error``: root mean square of d - m over that of x - m;
- ``coverage``: share of the cells with :math:`\lVert x - m \rVert` at most the 16th smallest of 19
  :math:`\lVert d - m \rVert`, .8 for a calibrated model;
- ``spearman``: rank correlation over cells of the error with the median length of d - m, to which ``obs["spatial_reconstructed_uncertainty"]`` is
  proportional; ``spearman, rms``: with the root mean square length;
- ``energy``: energy score (Gneiting & Raftery 2007), :math:`\mathbb E \lVert d - x \rVert - \tfrac12 \mathbb E \lVert d - d' \rVert`,
  mean over cells, smaller is better.

Methods are ``placement`` and ``mean`` (scores of ``_placement.py``), ``draws`` and ``time``. In three dimensions the first two also
have :func:`alphastomics.metrics.rigid_rmsd`, in which units and mirror images count, smaller is better. ``time`` compares a draw of
all cells with 25 passes of the network over all cells, the least that a reverse process of 25 steps takes: ``draw, s`` and
``passes, s``, processor time on one thread, medians of three repetitions in alternation with the model of the first seed, and
``passes / draw``. A draw is half of a call of ``model.sample`` for two. Run as
``python -m benchmarks.calibration --benchmark seqfish --model-dir DIR``.
"""

from __future__ import annotations

import time
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
from scipy.stats import spearmanr

from alphastomics import metrics
from benchmarks import _held_out, _models, _placement
from benchmarks._data import BENCHMARKS, find_data
from benchmarks._report import Results, summarize, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics
    from benchmarks._data import Fold

    Array = NDArray[np.float64]

N_DRAWS, N_COMPARED = 19, 9  # the second: draws of which all pairs are compared
RANK = 16  # of 19 distances: a region of 80 %
N_SHARED = 20  # cells over which a displacement is averaged
N_PASSES, N_REPEATS = 25, 3
COMPARED = ("knn_20", "distance_spearman", "aligned_rmsd")
COLUMNS = (
    *(f"{score}, {what}" for score in COMPARED for what in ("truth", "draws", "ratio")),
    *("nn_ks", "smooth, error", "smooth, draws", "rough, error", "rough, draws"),
    *("spread_over_error", "coverage", "spearman", "spearman, rms", "energy"),
)
TIMES = ("draw, s", "passes, s", "passes / draw")
METHODS = ("placement", "mean", "draws", "time")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _held_out.parser("calibration", tissue="seqfish", tissues=BENCHMARKS)
    parser.add_argument("--mode", default=_models.MODE, choices=("any", "expr_to_pos"), help="mode of the models")
    return _held_out.parse(parser, argv)


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


def compare(draws: Array, mean: Array, truth: Array) -> dict[str, float]:
    """Scores of draws (K, N, D) around a mean (N, D)."""
    compared = draws[:N_COMPARED]
    with_truth = [_placement.score(truth, draw) for draw in compared]
    between = [_placement.score(a, b) for a, b in combinations(compared, 2)]
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
        "spearman": float(spearmanr(np.median(lengths, axis=0), length).statistic),
        "spearman, rms": float(spearmanr(np.sqrt((lengths**2).mean(0)), length).statistic),
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
        positions = np.asarray(cells.obsm["spatial_reconstructed"]).reshape(-1, *fold.truth.shape)
        placed = np.stack([fold.in_source_order(each) for each in positions])
        found[method] = (placed if method == "draws" else placed[0], seconds)
    return found


def time_draw(model: AlphaSTomics, fold: Fold, seed: int) -> dict[str, float]:
    """Processor time of a draw and of the passes in seconds, and their ratio."""
    import torch

    module, n_threads = model.module.eval(), torch.get_num_threads()
    t = torch.full((1,), 0.5, device=module.device)
    sizes = module.config.n_genes, module.config.n_dims
    expression, position = (torch.randn(1, len(fold.truth), n, device=module.device) for n in sizes)

    def draw() -> None:
        model.sample(fold.query.copy(), mode="expr_to_pos", n_samples=2, random_state=seed)

    @torch.no_grad()
    def passes() -> None:
        h = module.embed_expression(expression, 0 * t)
        for _ in range(N_PASSES):
            noisy = h + module.embed_position(position, t)
            module.trunk(noisy, 0 * t, t, None, ("position",), position=position).position.cpu()

    taken: dict[Callable[[], None], list[float]] = {draw: [], passes: []}
    torch.set_num_threads(1)
    try:
        for _ in range(N_REPEATS):
            for function, seconds in taken.items():
                start = time.process_time()
                function()
                seconds.append(time.process_time() - start)
    finally:
        torch.set_num_threads(n_threads)
    one, all_passes = float(np.median(taken[draw])) / 2, float(np.median(taken[passes]))
    return dict(zip(TIMES, (one, all_passes, all_passes / one), strict=True))


def run(results: Results, fold: Fold, *, seed: int, options: argparse.Namespace) -> None:
    """Score the placement, the mean and the draws of one fold, and with the first seed time a draw."""
    methods = METHODS if seed == options.seeds[0] else METHODS[:-1]
    parameters = _models.training_parameters(options.minutes, mode=options.mode) | {"n_draws": N_DRAWS}
    if all(results.find(parameters, method=name, fold=fold.name, seed=seed) for name in methods):
        return
    path = _models.model_path(options.model_dir, options.benchmark, fold.name, mode=options.mode, seed=seed)
    model, train_seconds = _models.train_or_load(
        fold.reference, seed=seed, minutes=options.minutes, mode=options.mode, path=path
    )
    perturbation, found = model.fitted_.perturbation, sample(model, fold, seed)
    scores, timed = {}, {"time": 0.0}
    if "time" in methods:
        scores["time"] = time_draw(model, fold, seed)
    for method, (positions, seconds) in found.items():
        timed[method] = seconds
        if method == "draws":
            scores[method] = compare(positions, found["mean"][0], fold.truth)
        else:
            scores[method] = _placement.score(fold.truth, positions)
            if fold.truth.shape[1] == 3:
                scores[method]["rigid_rmsd"] = metrics.rigid_rmsd(fold.truth, positions)
    for method in methods:
        _held_out.keep(
            results, method, fold.name, seed, parameters=parameters, scores=scores[method],
            seconds=timed[method], train_seconds=round(train_seconds, 1), model=_models.fingerprint(model),
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
    summary = summarize(results.entries, METHODS, [fold.name for fold in folds], options.seeds)
    results.write(summary=summary)
    placed = (*_placement.METRICS, *rigid)
    for methods, columns in (METHODS[:2], placed), (("draws",), COLUMNS), (("time",), TIMES):
        print(table({method: summary[method] for method in methods if method in summary}, columns))


if __name__ == "__main__":
    main()
