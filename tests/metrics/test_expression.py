"""Scores of expression against scipy, scikit-learn and NumPy, whatever the storage, block by block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import sparse
from scipy.stats import pearsonr
from sklearn.metrics import mean_squared_error
from sklearn.metrics.pairwise import paired_cosine_distances

from alphastomics.metrics import (
    _distances,
    cosine_per_cell,
    expression_mse,
    expression_scores,
    pearson_per_cell,
    pearson_per_gene,
    variance_ratio_per_gene,
)

KEYS = ["expression_mse", "pearson_gene", "pearson_cell", "cosine_cell", "variance_ratio"]
SINGLE = [expression_mse, pearson_per_gene, pearson_per_cell, cosine_per_cell, variance_ratio_per_gene]


def noisy_counts(n_cells: int = 60, n_genes: int = 25, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sparse non-negative values far from zero mean, and a prediction of them; no gene and no cell is constant."""
    rng = np.random.default_rng(seed)
    rate = rng.gamma(1, 2, size=(n_cells, n_genes))
    return rng.poisson(rate) + 0.0, rng.poisson(rate) + 0.0


def oracle(true: np.ndarray, predicted: np.ndarray) -> list:
    return [
        mean_squared_error(true, predicted),
        np.array([pearsonr(y, x).statistic for y, x in zip(true.T, predicted.T, strict=True)]),
        np.array([pearsonr(y, x).statistic for y, x in zip(true, predicted, strict=True)]),
        1 - paired_cosine_distances(true, predicted),
        predicted.var(axis=0) / true.var(axis=0),
    ]


@pytest.mark.parametrize("entries", [1, 200, 10**9])
@pytest.mark.parametrize("store", [np.asarray, sparse.csr_matrix, sparse.csc_matrix, sparse.csr_array, np.float32])
def test_scores_equal_their_oracles_in_any_storage(monkeypatch, entries, store):
    true, predicted = noisy_counts()
    monkeypatch.setattr(_distances, "CHUNK_ENTRIES", entries)
    for function, expected in zip(SINGLE, oracle(true, predicted), strict=True):
        np.testing.assert_allclose(function(store(true), store(predicted)), expected, atol=1e-9)


@pytest.mark.parametrize("shift", [0.0, 1e4])
def test_moments_do_not_cancel(shift):
    true, predicted = noisy_counts()
    for function in (pearson_per_gene, variance_ratio_per_gene):
        np.testing.assert_allclose(function(true + shift, predicted + shift), function(true, predicted), atol=1e-9)


def test_the_summary_is_over_what_is_defined():
    true, predicted = noisy_counts()
    true[:, 3] = true[7] = 0.1  # a mean of equal values that is not exactly their value
    assert true[:, 3].mean() != 0.1
    scores = expression_scores(true, predicted)
    assert list(scores) == KEYS
    assert all(type(value) is float for value in scores.values())
    gene, cell, ratio = (f(true, predicted) for f in (pearson_per_gene, pearson_per_cell, variance_ratio_per_gene))
    assert np.flatnonzero(np.isnan(gene)).tolist() == np.flatnonzero(np.isnan(ratio)).tolist() == [3]
    assert np.flatnonzero(np.isnan(cell)).tolist() == [7]
    expected = [
        mean_squared_error(true, predicted),
        np.mean([pearsonr(true[:, g], predicted[:, g]).statistic for g in range(25) if g != 3]),
        np.mean([pearsonr(true[i], predicted[i]).statistic for i in range(60) if i != 7]),
        np.mean(1 - paired_cosine_distances(true, predicted)),
        np.median([predicted[:, g].var() / true[:, g].var() for g in range(25) if g != 3]),
    ]
    assert list(scores.values()) == pytest.approx(expected, abs=1e-9)


def test_constant_predictions_do_not_improve_the_score():
    true, predicted = noisy_counts()
    silent = predicted.copy()
    silent[:, :5] = 0.3
    assert pearson_per_gene(true, silent)[:5].tolist() == [0] * 5
    assert variance_ratio_per_gene(true, silent)[:5].tolist() == [0] * 5
    nothing = expression_scores(true, np.zeros_like(true))
    assert [nothing[key] for key in KEYS[1:]] == [0, 0, 0, 0]
    empty = true.copy()
    empty[2] = 0
    assert np.flatnonzero(np.isnan(cosine_per_cell(empty, predicted))).tolist() == [2]


@pytest.mark.parametrize("store", [np.asarray, sparse.csr_matrix, sparse.csc_matrix])
@pytest.mark.parametrize("side", [0, 1])
def test_unmeasured_genes_cost_nothing(store, side):
    pair = noisy_counts()
    kept = np.arange(25) % 5 > 0
    expected = expression_scores(*(values[:, kept] for values in pair))
    pair[side][:, ~kept] = np.nan
    stored = [store(values) for values in pair]
    assert expression_scores(*stored) == pytest.approx(expected, rel=1e-12)
    for function in (pearson_per_gene, variance_ratio_per_gene):
        assert np.array_equal(np.isnan(function(*stored)), ~kept)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**31))
def test_scores_do_not_depend_on_the_order_of_cells_and_genes(seed):
    true, predicted = noisy_counts(seed=seed)
    rng = np.random.default_rng(seed)
    cells, genes = rng.permutation(60), rng.permutation(25)
    again = expression_scores(true[cells][:, genes], predicted[cells][:, genes])
    assert again == pytest.approx(expression_scores(true, predicted), abs=1e-9)


def test_perfect_prediction_and_too_few_cells():
    true, _ = noisy_counts()
    assert expression_scores(true, true) == pytest.approx(dict(zip(KEYS, [0, 1, 1, 1, 1], strict=True)), abs=1e-12)
    for shape in ((0, 5), (5, 0)):
        assert np.isnan(list(expression_scores(np.zeros(shape), np.zeros(shape)).values())).all()
    one = expression_scores(true[:1], true[:1])
    assert np.isnan([one["pearson_gene"], one["variance_ratio"]]).all()
    assert one["pearson_cell"] == pytest.approx(1)


@pytest.mark.parametrize("store", [np.asarray, sparse.csr_matrix])
def test_invalid_input_raises(store):
    true, predicted = noisy_counts()
    with pytest.raises(ValueError, match=r"\(60, 25\).*\(59, 25\)"):
        expression_scores(store(true), store(predicted[1:]))
    for value in (np.nan, np.inf):
        broken = predicted.copy()
        broken[[3, 5], 4] = value
        with pytest.raises(ValueError, match="gene 4.* 2 of 60"):
            expression_scores(store(true), store(broken))
    with pytest.raises(ValueError, match="n_cells, n_genes"):
        expression_scores(true[0], predicted[0])
