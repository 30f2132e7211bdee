r"""Predicted uncertainty compared with the error on a held-out slice.

The results of ``model.sample`` are scored: a prediction and its standard deviation s for every cell.

**Position.** The held-out slice is placed from its expression alone by 8 draws, with ``reduce="mean"`` and with
``reduce="medoid"``; s is ``obs["spatial_reconstructed_uncertainty"]``, the distance of the draws from the prediction. The prediction is aligned to the truth by the transform of
``aligned_rmsd`` in ``_placement.py`` (rotation, reflection, shift and scale, which expression does not contain), and s is scaled with it;
the error e is the remaining distance, in the units of the truth.

**Expression.** It is predicted at the registered positions of the held-out slice, task (a) of ``pos_to_expr.py``, by 8
samples of 10 steps, and compared in the 95 % of the cells that were not used for registration; e is the absolute difference for every
gene and cell (D = 1). Row ``log1p``: mean and standard deviation of the samples (``reduce=None``), as log1p at the median library
size of the reference. Row ``layers["sd"]``: ``X`` and ``layers["sd"]`` of ``reduce="mean"``, in the units of the reference, against
counts scaled to that library size.

- ``spearman``: rank correlation of s with e over cells, 0 if either is constant; for expression the mean over genes;
- ``coverage``: share of the truth within the 80 % region of an isotropic Gaussian around the prediction,
  :math:`e \le s \sqrt{\chi^2_{D, .8} / D}`;
- ``error_over_spread``: root mean square e over root mean square s, 1 for calibrated draws.

Run as ``python -m benchmarks.uncertainty``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import chi2, rankdata

from benchmarks import _held_out, _models, _placement
from benchmarks._data import make_fold
from benchmarks._report import table
from benchmarks.pos_to_expr import dense, gene_correlation, make_task, normalized

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
DRAWS: dict[str, Any] = {"n_samples": 8}
# Rows, with the arguments of `model.sample`.
POSITION_ROWS: dict[str, dict[str, Any]] = {
    "position, mean": DRAWS | {"reduce": "mean"},
    "position, medoid": DRAWS | {"reduce": "medoid"},
}
EXPRESSION_ROWS: dict[str, dict[str, Any]] = {
    "expression, log1p": DRAWS | {"n_steps": 10, "reduce": None},
    'expression, layers["sd"]': DRAWS | {"n_steps": 10, "reduce": "mean"},
}
SCORES = ("spearman", "coverage", "error_over_spread")


def align(predicted: Array, truth: Array) -> tuple[Array, float]:
    """The prediction (N, D) after the best similarity transform to the truth, and the scale of that transform."""
    rotation, _ = _placement.rigid_fit(predicted, truth)
    goal = truth.mean(0)
    turned = (predicted - predicted.mean(0)) @ rotation
    scale = float((turned * (truth - goal)).sum() / (turned**2).sum())
    return turned * scale + goal, scale


def score_positions(predicted: Array, s: Array, truth: Array) -> dict[str, float]:
    """Scores of positions (N, D) with standard deviations (N,) in any frame and scale."""
    aligned, scale = align(predicted, truth)
    error = np.linalg.norm(aligned - truth, axis=1)
    return score(error[:, None], scale * s[:, None], n_dims=truth.shape[1])


def score(error: Array, s: Array, *, n_dims: int = 1) -> dict[str, float]:
    """Scores of standard deviations (N, M) by the errors (N, M) of N cells in M quantities of ``n_dims`` dimensions."""
    return {
        "spearman": float(gene_correlation(rankdata(s, axis=0), rankdata(error, axis=0)).mean()),
        "coverage": float((error <= s * np.sqrt(chi2.ppf(SHARE, n_dims) / n_dims)).mean()),
        "error_over_spread": float(np.sqrt((error**2).mean() / max((s**2).mean(), 1e-12))),
    }


def place(model: AlphaSTomics, fold: Fold, row: str, *, seed: int) -> tuple[Array, Array]:
    """Positions (N, D) of the held-out slice and their standard deviations (N,), in the order of the truth."""
    placed = model.sample(fold.query.copy(), mode="expr_to_pos", random_state=seed, **POSITION_ROWS[row])
    uncertainty = placed.obs["spatial_reconstructed_uncertainty"].to_numpy()
    return fold.in_source_order(placed.obsm["spatial_reconstructed"]), fold.in_source_order(uncertainty)


def predict_expression(model: AlphaSTomics, task: Task, row: str, *, seed: int) -> tuple[Array, Array, Array]:
    """Expression, its standard deviations and the truth, all (N, G), of the cells that did not register the slice."""
    depth, scored = model.schema.library_size, np.setdiff1d(np.arange(task.query.n_obs), task.known)
    places = task.query.copy()
    places.X = None
    arguments = EXPRESSION_ROWS[row]
    predicted = model.sample(places, mode="pos_to_expr", random_state=seed, **arguments)
    true = normalized(task.query.X, depth)[scored]
    if arguments["reduce"] is None:
        draws = normalized(predicted.X, depth).reshape(arguments["n_samples"], task.query.n_obs, -1)[:, scored]
        return draws.mean(0), draws.std(0, ddof=1), true
    return dense(predicted.X)[scored], dense(predicted.layers["sd"])[scored], np.expm1(true)


def main(argv: Sequence[str] | None = None) -> None:
    """Score every unfinished fold and seed, and print the table."""
    options = _held_out.parse(_held_out.parser("uncertainty", tissue="seqfish"), argv)
    _, summary = _held_out.run_folds(run, options)
    print(table(summary, SCORES))


def run(
    results: Results, name: str, reference: AnnData, held_out: AnnData, *, seed: int, options: argparse.Namespace
) -> None:
    """Score positions and expression of one fold."""
    training = _models.training_parameters(options.minutes, mode="any")
    parameters = {row: training | arguments for row, arguments in (POSITION_ROWS | EXPRESSION_ROWS).items()}
    left = [row for row in parameters if not results.find(parameters[row], method=row, fold=name, seed=seed)]
    if not left:
        return
    model, train_seconds = _held_out.trained(reference, name, mode="any", seed=seed, options=options)
    fold, task = make_fold(name, reference, held_out), make_task(reference, held_out, seed=seed)
    for row in left:
        start = time.perf_counter()
        if row in POSITION_ROWS:
            scores = score_positions(*place(model, fold, row, seed=seed), fold.truth)
        else:
            predicted, s, true = predict_expression(model, task, row, seed=seed)
            scores = score(np.abs(predicted - true), s)
        _held_out.keep(
            results, row, name, seed, parameters=parameters[row], scores=scores, seconds=time.perf_counter() - start,
            train_seconds=round(train_seconds, 1), model=_models.fingerprint(model),
        )  # fmt: skip


if __name__ == "__main__":
    main()
