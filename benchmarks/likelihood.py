r"""A likelihood of counts compared with Gaussian diffusion and the marginals of the reference.

Expression is predicted at the registered positions of a held-out slice, task (a) of ``pos_to_expr.py``, with the same scores.
A negative binomial of mean :math:`\mu` and inverse dispersion :math:`\theta_g`,

.. math:: \operatorname{Var} x = \mu + \mu^2 / \theta_g,

replaces each part of the model in turn.

**Means.** Over the same 200 neighbors in the reference, so that only the likelihood differs: ``mean, log1p``
averages log1p at the median library size, the maximum-likelihood estimate of a Gaussian on that scale; ``mean, counts`` is the
maximum-likelihood rate of the negative binomial, with the library size of each cell.

**Single samples.** ``sample, counts`` samples the negative binomial around the mean of the model's samples, independently for every
cell, like an output layer with that likelihood; ``sample, model`` is a sample of the model. Further scores:
``genes``, the correlation of gene-gene correlations with those of the truth; ``zeros``, the share of zeros over that of the
truth.

:math:`\theta_g` is estimated by moments on the reference, around the rates of its neighbors. Run as
``python -m benchmarks.likelihood``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import KDTree

from benchmarks import _held_out, _models, pos_to_expr
from benchmarks._placement import nearest_neighbors
from benchmarks._report import table
from benchmarks.pos_to_expr import (
    REFERENCE_NEIGHBORS,
    dense,
    draw_expression,
    make_task,
    neighbor_mean,
    normalized,
    score,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from benchmarks._report import Results

    Array = NDArray[np.float64]

SCORES = (*pos_to_expr.SCORES, "genes", "zeros")
DRAWS = 8  # of the model, whose mean the negative binomial is drawn about
ROUNDS = 5  # of reweighting
LEAST_THETA, MOST_THETA = 0.05, 1e3


def rates(counts: Array, size: Array, near: NDArray[np.intp], theta: Array) -> Array:
    """Rates (N, G) of maximum likelihood over the rows ``near`` (N, k) of ``counts`` (M, G) with library sizes (M,).

    Where the sum over neighbors of w (x - size rate) is zero, w = 1 / (1 + size rate / theta), by reweighting.
    """
    rate = neighbor_mean(counts, near) / neighbor_mean(size[:, None], near)
    for _ in range(ROUNDS):
        top, bottom = np.zeros_like(rate), np.zeros_like(rate)
        for rank in near.T:  # never (N, k, G)
            w = 1 / (1 + size[rank, None] * rate / theta)
            top += w * counts[rank]
            bottom += w * size[rank, None]
        rate = top / bottom
    return rate


def dispersion(counts: Array, mean: Array) -> Array:
    """Inverse dispersion (G,) by moments."""
    excess = ((counts - mean) ** 2 - mean).sum(0)
    return np.clip((mean**2).sum(0) / np.maximum(excess, 1e-12), LEAST_THETA, MOST_THETA)


def negative_binomial(mean: Array, theta: Array, rng: np.random.Generator) -> Array:
    """Sampled counts (N, G): Poisson with a gamma-distributed rate of that mean and shape theta."""
    return rng.poisson(rng.gamma(theta, mean / theta)).astype(np.float64)


def likeness(drawn: Array, true: Array) -> dict[str, float]:
    """``genes`` and ``zeros`` of a sample, both (N, G) on the scale of the scores."""
    varies = (drawn.std(0) > 0) & (true.std(0) > 0)
    above = np.triu_indices(int(varies.sum()), 1)
    sampled, measured = (np.corrcoef(values[:, varies].T)[above] for values in (drawn, true))
    return {
        "genes": float(np.corrcoef(sampled, measured)[0, 1]),
        "zeros": float((drawn == 0).mean() / (true == 0).mean()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Score every unfinished fold and seed, and print the table."""
    options = _held_out.parse(_held_out.parser("likelihood"), argv)
    _, summary = _held_out.run_folds(run, options)
    print(table(summary, SCORES))


def run(
    results: Results, name: str, reference: AnnData, held_out: AnnData, *, seed: int, options: argparse.Namespace
) -> None:
    """Score means and samples of one fold."""
    training = _models.training_parameters(options.minutes)
    if results.find(training, method="sample, counts", fold=name, seed=seed):
        return
    start = time.perf_counter()
    task = make_task(reference, held_out, seed=seed)
    model, _ = _held_out.trained(reference, name, mode=_models.MODE, seed=seed, options=options)
    depth = model.schema.library_size
    true = normalized(task.query.X, depth)
    counts = dense(task.reference.X)
    size = counts.sum(1)
    own = nearest_neighbors(task.places, REFERENCE_NEIGHBORS)
    near = KDTree(task.places).query(task.query.obsm["spatial"], REFERENCE_NEIGHBORS)[1]
    poisson = np.full(counts.shape[1], MOST_THETA)
    theta = dispersion(counts, size[:, None] * rates(counts, size, own, poisson))
    means = {
        "mean, log1p": neighbor_mean(normalized(counts, depth), near),
        "mean, counts": np.log1p(depth * rates(counts, size, near, theta)),
    }
    for method, values in means.items():
        _held_out.keep(results, method, name, seed, parameters={}, scores=score(values, true, task))
    draws = draw_expression(model, task.query, None, seed=seed, n_samples=DRAWS)
    drawn = negative_binomial(draws.mean(0), theta, np.random.default_rng(seed))
    for method, sample in (("sample, model", draws[0]), ("sample, counts", drawn)):
        values = normalized(sample, depth)
        _held_out.keep(
            results, method, name, seed, parameters=training, scores=score(values, true, task) | likeness(values, true),
            seconds=time.perf_counter() - start, model=_models.fingerprint(model),
        )  # fmt: skip


if __name__ == "__main__":
    main()
