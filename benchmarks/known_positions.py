"""Placement of a slice of which some positions are known, 5 % by default.

The known cells are chosen at random, by the seed. The model is trained on other slices or, with ``--within``, on the known cells of the
slice, as :func:`alphastomics.tl.reconstruct` trains it when it is given nothing else. All methods are scored on the other cells, by
``distance_spearman``, ``knn_20``, ``contact_5`` and ``aligned_rmsd`` of ``_placement.py``:

- ``known, placement``: ``model.sample(query, mode="expr_to_pos", inpaint=True)``;
- ``known, unconditioned``: the placement of all cells by the same model without known positions;
- ``known, alone``: the placement of the other cells by the same model, without the known cells;
- ``known, kriging``: Gaussian process regression of the known positions over the embedding of the query by the same model
  (``get_latent_representation``, standardized), without the conditional mean as a trend. The kernel is an isotropic radial basis
  function and white noise, and its parameters maximize the marginal likelihood (scikit-learn);
- ``known, kriging of expression``: the same over 20 principal components of the standardized expression of the query. The model is
  not used;
- ``known, nearest neighbors``: the mean position of the 25 known cells with the most similar expression (``baselines/knn_regression.py``).

Features and numbers of components were chosen on the held-out slices, among 10, 20 and 50 components and the embeddings of both layers,
which favors the baselines. Run as ``python -m benchmarks.known_positions --benchmark seqfish --model-dir DIR``, and with
``--known-share 0.8 --within`` for a slice that lacks a fifth of its positions. Kriging, whose time grows with the cube of the number of
known cells, is left out with more than 2,000 of them.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial.distance import pdist
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from benchmarks import _held_out, _models, _placement
from benchmarks._data import BENCHMARKS, find_data
from benchmarks._report import Results, summarize, table
from benchmarks.baselines._features import expression_features, principal_components
from benchmarks.baselines.knn_regression import knn_25

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.model import AlphaSTomics
    from benchmarks._data import Fold

    Array = NDArray[np.float64]

KNOWN_SHARE = 0.05
MAX_KRIGED = 2000
N_COMPONENTS = 20
SCORES = ("distance_spearman", "knn_20", "contact_5", "aligned_rmsd")
PLACEMENT, UNCONDITIONED, ALONE = "known, placement", "known, unconditioned", "known, alone"
NEAREST = "known, nearest neighbors"
KRIGING, KRIGING_EXPRESSION = "known, kriging", "known, kriging of expression"
METHODS = (PLACEMENT, UNCONDITIONED, ALONE, KRIGING, KRIGING_EXPRESSION, NEAREST)


def krige(feature: Array, known: NDArray[np.intp], position: Array) -> Array:
    """Positions (N, D) of cells with ``feature`` (N, F), given those of the ``known`` cells (n, D)."""
    length = float(np.median(pdist(feature[known])))
    kernel = ConstantKernel() * RBF(length, (length / 100, length * 100)) + WhiteKernel(0.3, (1e-5, 10.0))
    process = GaussianProcessRegressor(kernel, normalize_y=True, n_restarts_optimizer=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # an optimum at a bound, such as no noise, is admissible
        return process.fit(feature[known], position).predict(feature)


def split(n_cells: int, seed: int, share: float = KNOWN_SHARE) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Cells whose positions are known, and the others."""
    known, rest = np.split(np.random.default_rng(seed).permutation(n_cells), [round(share * n_cells)])
    return np.sort(known), np.sort(rest)


def known_cells(fold: Fold, known: NDArray[np.intp]) -> AnnData:
    """The cells ``known`` of the held-out slice, with their positions."""
    rows = np.flatnonzero(np.isin(fold.order, known))
    cells = fold.query[rows].copy()
    cells.obsm["spatial"] = fold.truth[fold.order[rows]]
    return cells


def place(model: AlphaSTomics, fold: Fold, method: str, known: NDArray[np.intp], *, seed: int) -> Array:
    """Positions (N, D) of the cells, in the order of the truth, if those of the cells ``known`` (n,) are given; NaN: not placed."""
    query, given = fold.query.copy(), np.full_like(fold.truth, np.nan)
    given[known] = fold.truth[known]
    if method in (PLACEMENT, UNCONDITIONED):
        if method == PLACEMENT:
            query.obsm["spatial"] = given[fold.order]
        return fold.in_source_order(_models.sample(model, query, seed=seed, inpaint=method == PLACEMENT))
    if method == ALONE:
        rows = np.flatnonzero(~np.isin(fold.order, known))
        placed = np.full_like(fold.truth, np.nan)
        placed[fold.order[rows]] = _models.sample(model, query[rows].copy(), seed=seed, inpaint=False)
        return placed
    if method == NEAREST:
        return fold.in_source_order(knn_25(known_cells(fold, known), query, seed=seed))
    if method == KRIGING:
        feature = np.asarray(model.get_latent_representation(query), dtype=np.float64)
        feature = (feature - feature.mean(0)) / np.maximum(feature.std(0), 1e-6)
    else:
        standardized, _ = expression_features(query, query, scale=True)
        feature, _ = principal_components(standardized, standardized, n_components=N_COMPONENTS)
    return krige(fold.in_source_order(feature), known, fold.truth[known])


def run(results: Results, fold: Fold, *, seed: int, options: argparse.Namespace) -> None:
    """Score all methods on one fold."""
    parameters = _models.training_parameters(options.minutes) | {"known_share": options.known_share}
    if options.within:
        parameters["within"] = True
    known, rest = split(len(fold.truth), seed, options.known_share)
    methods = [m for m in METHODS if len(known) <= MAX_KRIGED or m not in (KRIGING, KRIGING_EXPRESSION)]
    if all(results.find(parameters, method=method, fold=fold.name, seed=seed) for method in methods):
        return
    reference, name = (
        (known_cells(fold, known), f"{fold.name}_within") if options.within else (fold.reference, fold.name)
    )
    path = _models.model_path(options.model_dir, options.benchmark, name, mode=_models.MODE, seed=seed)
    model, train_seconds = _models.train_or_load(
        reference, seed=seed, minutes=options.minutes, mode=_models.MODE, path=path
    )
    for method in methods:
        start = time.perf_counter()
        placed = place(model, fold, method, known, seed=seed)
        seconds = time.perf_counter() - start
        scores = _placement.score(fold.truth[rest], placed[rest])
        _held_out.keep(
            results, method, fold.name, seed, parameters=parameters, scores={name: scores[name] for name in SCORES},
            seconds=seconds, train_seconds=round(train_seconds, 1), model=_models.fingerprint(model),
        )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Score every unfinished fold and seed, and print the table."""
    parser = _held_out.parser("known_positions", tissue="seqfish", tissues=BENCHMARKS)
    parser.add_argument(
        "--known-share", type=float, default=KNOWN_SHARE, help="share of the cells of the held-out slice"
    )
    parser.add_argument("--within", action="store_true", help="train on the known cells, not on other slices")
    options = _held_out.parse(parser, argv)
    folds = BENCHMARKS[options.benchmark](find_data(options.data_dir))
    results = Results(options.output, {"benchmark": "known_positions", "tissue": options.benchmark})
    for seed in options.seeds:
        for fold in folds:
            run(results, fold, seed=seed, options=options)
    summary = summarize(results.entries, METHODS, [fold.name for fold in folds], options.seeds)
    results.write(summary=summary)
    print(table(summary, SCORES))


if __name__ == "__main__":
    main()
