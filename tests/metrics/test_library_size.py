"""The scale of the scores against scanpy."""

from __future__ import annotations

import numpy as np
import pytest
from anndata import AnnData
from scipy import sparse

from alphastomics.metrics import log1p_normalized, median_library_size


def some_counts() -> np.ndarray:
    counts = np.random.default_rng(0).poisson(2.0, size=(30, 12))
    counts[4] = 0
    return counts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Some cells have zero counts:UserWarning")
def test_equals_scanpy():
    import scanpy as sc

    expected = AnnData(sparse.csr_matrix(some_counts(), dtype=np.float64))
    sc.pp.normalize_total(expected, target_sum=17.0)
    sc.pp.log1p(expected)
    np.testing.assert_allclose(log1p_normalized(some_counts(), 17.0), expected.X.toarray(), atol=1e-12)


def stored_twice(x):
    """Each value as the sum of two stored ones."""
    twice = sparse.hstack([sparse.csr_matrix(x - x // 2), sparse.csr_matrix(x // 2)], format="csr")
    return sparse.csr_matrix((twice.data, twice.indices % x.shape[1], twice.indptr), x.shape)


@pytest.mark.parametrize("store", [np.asarray, sparse.csr_matrix, sparse.csc_matrix, stored_twice])
@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_equals_the_formula_in_any_storage(store, dtype):
    counts = some_counts()
    expected = np.log1p(17.0 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))
    stored = store(counts.astype(dtype))
    result = log1p_normalized(stored, 17.0)
    assert sparse.issparse(result) == sparse.issparse(stored)
    dense = result.toarray() if sparse.issparse(result) else result
    np.testing.assert_allclose(dense, expected, atol=1e-12)
    np.testing.assert_array_equal(stored.toarray() if sparse.issparse(stored) else stored, counts)


def test_empty_cells_do_not_count_in_the_median():
    counts = np.diag([0, 1, 3, 10])
    assert median_library_size(counts) == median_library_size(sparse.csr_matrix(counts)) == 3
    assert np.isnan(median_library_size(np.zeros((2, 2))))


@pytest.mark.parametrize("store", [np.asarray, sparse.csr_matrix])
def test_an_unmeasured_gene_does_not_affect_others(store):
    counts = some_counts().astype(float)
    kept = np.delete(np.arange(counts.shape[1]), 1)
    counts[:, 1] = np.nan
    result = log1p_normalized(store(counts), 17.0)
    dense = result.toarray() if sparse.issparse(result) else result
    np.testing.assert_allclose(dense[:, kept], log1p_normalized(counts[:, kept], 17.0))
    assert np.isnan(dense[:, 1]).all()
    assert median_library_size(store(counts)) == median_library_size(counts[:, kept])


def test_a_library_size_that_is_not_finite_raises():
    with pytest.raises(ValueError, match="library_size=nan must be finite"):
        log1p_normalized(some_counts(), float("nan"))


def test_negative_values_raise():
    with pytest.raises(ValueError, match="negative"):
        log1p_normalized(sparse.csr_matrix([[1.0, -1.0]]), 10)
