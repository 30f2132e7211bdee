"""The fast way to network units is the definition's, for cells stored in any way."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings, strategies as st
from scipy import stats

from alphastomics.data import fit_schema
from alphastomics.data._encode import SMALL_COUNT, Encoder, dense_rows, thin, thin_rows
from alphastomics.datasets import synthetic_tissue
from dense_encoding import encode


@pytest.fixture(scope="module")
def tissue():
    return synthetic_tissue(n_slices=2, n_cells=120, n_genes=30, random_state=1)


@pytest.mark.parametrize("transform", ["log1p", "none"])
@pytest.mark.parametrize("n_measured", [30, 12])
def test_encoding_equals_the_definition_for_sparse_and_dense_cells(tissue, transform, n_measured):
    schema = fit_schema(tissue, transform=transform)
    measured = np.arange(30) % 5 < n_measured / 6
    assert measured.sum() == n_measured
    counts = tissue.X.toarray().astype(np.float64) * measured
    counts[3] = 0
    if transform == "none":
        counts = np.where(measured, counts - 1.5, 0.0)
    columns = np.flatnonzero(measured)
    expected = encode(schema, counts, measured)
    encoder, size = Encoder(schema, measured), counts.sum(axis=1)
    factor = encoder.factor(size)
    found = encoder(counts.astype(np.float32), factor)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(encoder(dense_rows(sp.csr_matrix(counts), 30), factor), found)
    some = dense_rows(sp.csr_matrix(counts[:, measured]), 30, columns=columns)
    np.testing.assert_array_equal(encoder(some, factor), found)
    assert (found[:, ~measured] == 0).all()


def test_values_far_out_are_clipped(tissue):
    schema = fit_schema(tissue, transform="none")
    values = np.full((2, 30), 1e6, dtype=np.float32)
    values[1] *= -1
    result = Encoder(schema, np.ones(30, dtype=bool))(values, np.ones(2, dtype=np.float32))
    assert (result == [[10.0], [-10.0]]).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), thinning=st.floats(0.01, 0.99))
def test_thinned_cells_are_the_same_however_they_are_stored(tissue, seed, thinning):
    sparse = dense_rows(sp.csr_matrix(tissue.X), 30, thinning=thinning, rng=np.random.default_rng(seed))
    dense = tissue.X.toarray().astype(np.float32)
    thin_rows(dense, thinning, np.random.default_rng(seed))
    np.testing.assert_array_equal(dense, sparse)


@pytest.mark.parametrize("count", [1, 2, 7, SMALL_COUNT, SMALL_COUNT + 1, 500])
@pytest.mark.parametrize("thinning", [0.05, 0.5, 0.9])
def test_thinned_counts_are_binomial(count, thinning):
    kept = thin(np.full(20_000, count, dtype=np.float32), thinning, np.random.default_rng(count))
    law = stats.binom(count, 1 - thinning)
    edges = np.unique(np.minimum(law.ppf(np.linspace(0.1, 0.9, 9)), count - 1))
    seen = np.histogram(kept, [-np.inf, *(edges + 0.5), np.inf])[0]
    expected = np.diff([0, *law.cdf(edges), 1]) * len(kept)
    assert expected.min() > 5
    assert stats.chisquare(seen, expected).pvalue > 1e-4
    assert (kept == np.trunc(kept)).all()


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=30), seed=st.integers(0, 1000))
def test_stored_zeros_stay_zero_and_change_no_other_count(counts, seed):
    counts = np.array(counts, dtype=np.float32)
    kept = thin(counts, 0.5, np.random.default_rng(seed))
    assert (kept >= 0).all()
    assert (kept <= counts).all()
    np.testing.assert_array_equal(kept[counts > 0], thin(counts[counts > 0], 0.5, np.random.default_rng(seed)))


def test_neighbors_in_memory_are_thinned_independently():
    kept = thin(np.tile(np.array([3, 40, 1], dtype=np.float32), 5000), 0.5, np.random.default_rng(0)).reshape(-1, 3)
    correlation = np.corrcoef(kept.T)[np.triu_indices(3, 1)]
    assert np.abs(correlation).max() < 0.05
    np.testing.assert_allclose(kept.mean(axis=0), [1.5, 20, 0.5], rtol=0.03)


@pytest.mark.parametrize(
    ("thinning", "rng"), [(0.5, None), (1.0, np.random.default_rng(0)), (-0.1, np.random.default_rng(0))]
)
def test_thinning_out_of_range_is_an_error(thinning, rng):
    with pytest.raises(ValueError, match="thinning"):
        thin(np.ones(3, dtype=np.float32), thinning, rng)
