r"""Does the model know where it is wrong? Its uncertainty against its true error, on a held-out slice.

**Position.** The held-out slice is placed by 8 draws of 25 steps from its expression alone. The uncertainty of a cell is
the one that the package gives, ``obs["position_uncertainty"]``: the root mean square distance s of the aligned draws from
their mean. Rows are the two predictions that come with it, the ``mean`` of the draws and their ``medoid``. The
prediction is brought onto the truth by the transform of the judge's ``aligned_rmsd`` (rotation, reflection, shift and
scale, which expression does not tell), draws and s with it; the error is the distance that is left.

**Expression.** It is written into the registered places of the held-out slice, question (a) of ``pos_to_expr.py``, by 16
draws, and compared in the 95 % of the cells that did not register it. Two rows: ``log1p`` (mean and standard deviation s
of the draws as log1p at the median library size of the reference), and ``layers["sd"]`` (mean and standard deviation in
the units of the reference, as ``reduce="mean"`` returns them, against counts scaled to that library size). The error is
the absolute difference, for every gene and cell.

- ``spearman``: rank correlation of s with the error over cells; for expression the mean over genes, 0 for one without
  error or spread;
- ``coverage``: share of the truth within the 80 % region of an isotropic Gaussian of this spread about the prediction:
  an error of at most :math:`s \sqrt{\chi^2_{D, .8} / D}` for positions in D dimensions, of 1.2816 s for expression;
- ``coverage_draws``: the same for the region that the draws themselves give: for positions the ball about the prediction
  that holds 80 % of the draws (draws other than the medoid; distances from the mean of the other draws), for expression
  the interval between their 10 % and 90 % quantiles. Quantiles of so few draws are at order statistics of rank
  p (K + 1), which another draw of the same distribution falls below with probability p;
- ``error_over_spread``: root mean square error over root mean square s. For the mean of K calibrated draws it is
  the root of (K + 1) / (K - 1); for the medoid, itself a draw, it is larger.

Run as ``python -m benchmarks.uncertainty``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial.distance import pdist, squareform
from scipy.stats import chi2, norm, rankdata, spearmanr

from benchmarks import _held_out, _judge, _ours
from benchmarks._data import make_fold
from benchmarks._report import table
from benchmarks.pos_to_expr import SAMPLES, draw_expression, gene_correlation, make_task, normalised

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics
    from benchmarks._data import Fold
    from benchmarks._report import Results
    from benchmarks.pos_to_expr import Task

    Array = NDArray[np.float64]

SHARE = 0.8
POSITION_DRAWS = {"n_steps": 25, "n_samples": 8}
POSITION_ROWS = ("position, mean", "position, medoid")
EXPRESSION_ROWS = ("expression, log1p", 'expression, layers["sd"]')
SCORES = ("spearman", "coverage", "coverage_draws", "error_over_spread")


def spread(draws: Array) -> Array:
    """Root mean square distance of the draws (K, N, D) from their mean, (N,)."""
    return np.sqrt(((draws - draws.mean(0)) ** 2).sum(-1).mean(0))


def medoid(draws: Array) -> int:
    """Number of the draw (K, N, D) nearest to all others."""
    return int(squareform(pdist(draws.reshape(len(draws), -1), "sqeuclidean")).sum(1).argmin())


def align(draws: Array, predicted: Array, truth: Array) -> tuple[Array, Array, float]:
    """Draws and prediction, moved by the similarity that brings the prediction nearest to the truth, and its scale."""
    rotation, _ = _judge.rigid_fit(predicted, truth)
    centre, goal = predicted.mean(0), truth.mean(0)
    turned = (predicted - centre) @ rotation
    scale = float((turned * (truth - goal)).sum() / (turned**2).sum())
    return ((draws - centre) @ rotation) * scale + goal, turned * scale + goal, scale


def judge_positions(draws: Array, truth: Array) -> dict[str, dict[str, float]]:
    """Scores of the mean and of the medoid of draws (K, N, D) that are aligned to each other."""
    n_draws, n_dims, m = len(draws), draws.shape[2], medoid(draws)
    found = {}
    for row, predicted in zip(POSITION_ROWS, (draws.mean(0), draws[m]), strict=True):
        moved, aligned, scale = align(draws, predicted, truth)
        error, s = np.linalg.norm(aligned - truth, axis=1), scale * spread(draws)
        distance = np.linalg.norm(moved - aligned, axis=2)
        # The mean holds each draw itself; from the mean of the others it is this much farther.
        away = distance * n_draws / (n_draws - 1) if row == POSITION_ROWS[0] else np.delete(distance, m, axis=0)
        found[row] = {
            "spearman": float(spearmanr(s, error).statistic),
            "coverage": float((error <= s * np.sqrt(chi2.ppf(SHARE, n_dims) / n_dims)).mean()),
            "coverage_draws": float((error <= np.quantile(away, SHARE, axis=0, method="weibull")).mean()),
            "error_over_spread": float(np.sqrt((error**2).mean() / max((s**2).mean(), 1e-12))),
        }
    return found


def judge_expression(draws: Array, true: Array) -> dict[str, float]:
    """Scores of draws (K, N, G) against the truth (N, G), in the same units."""
    mean, s = draws.mean(0), draws.std(0)
    error, tail = np.abs(mean - true), (1 - SHARE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0, method="weibull")
    return {
        "spearman": float(gene_correlation(rankdata(s, axis=0), rankdata(error, axis=0)).mean()),
        "coverage": float((error <= norm.ppf(1 - tail) * s).mean()),
        "coverage_draws": float(((low <= true) & (true <= high)).mean()),
        "error_over_spread": float(np.sqrt((error**2).mean() / max((s**2).mean(), 1e-12))),
    }


def place(model: AlphaSTomics, fold: Fold, *, seed: int) -> Array:
    """Aligned draws (K, N, D) of the positions of the held-out slice, in the order of the truth."""
    drawn = model.sample(fold.query.copy(), mode="expr_to_pos", random_state=seed, **POSITION_DRAWS)
    draws = drawn.obsm["spatial"].reshape(POSITION_DRAWS["n_samples"], fold.query.n_obs, -1)
    return np.stack([fold.in_source_order(draw) for draw in draws])


def write(model: AlphaSTomics, task: Task, *, seed: int) -> dict[str, dict[str, float]]:
    """Scores of both rows of expression."""
    depth, asked = model.schema.library_size, np.setdiff1d(np.arange(task.query.n_obs), task.known)
    draws = draw_expression(model, task.query, None, seed=seed)[:, asked]
    true = normalised(task.query.X, depth)[asked]
    scores = (judge_expression(normalised(draws, depth), true), judge_expression(draws, np.expm1(true)))
    return dict(zip(EXPRESSION_ROWS, scores, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Judge every fold and seed that is not finished, and print the table."""
    options = _held_out.parse(_held_out.parser("uncertainty", tissue="seqfish"), argv)
    _, summary = _held_out.run_folds(run, options)
    print(table(summary, SCORES))


def run(
    results: Results, name: str, reference: AnnData, held_out: AnnData, *, seed: int, options: argparse.Namespace
) -> None:
    """Positions and expression of one fold."""
    training = _ours.training_parameters(options.minutes, mode="any")
    parameters = dict.fromkeys(POSITION_ROWS, training | POSITION_DRAWS)
    parameters |= dict.fromkeys(EXPRESSION_ROWS, training | {"n_samples": SAMPLES})
    left = [r for r in parameters if not results.find(parameters[r], method=r, fold=name, seed=seed)]
    if not left:
        return
    model, train_seconds = _held_out.trained(reference, name, mode="any", seed=seed, options=options)
    for rows in (POSITION_ROWS, EXPRESSION_ROWS):
        if not set(rows) & set(left):
            continue
        start = time.perf_counter()
        if rows == POSITION_ROWS:
            fold = make_fold(name, reference, held_out)
            scores = judge_positions(place(model, fold, seed=seed), fold.truth)
        else:
            scores = write(model, make_task(reference, held_out, seed=seed), seed=seed)
        seconds = time.perf_counter() - start
        for row in rows:
            _held_out.keep(
                results, row, name, seed, parameters=parameters[row], scores=scores[row], seconds=seconds,
                train_seconds=round(train_seconds, 1), model=_ours.fingerprint(model),
            )  # fmt: skip


if __name__ == "__main__":
    main()
