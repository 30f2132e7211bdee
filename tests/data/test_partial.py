from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from alphastomics import _keys
from alphastomics.data import AnnDataSource, fit_schema, read_partial
from alphastomics.datasets import synthetic_tissue


@pytest.fixture
def adata():
    return synthetic_tissue(n_slices=2, n_cells=60, n_genes=25, random_state=0)


@pytest.mark.parametrize("transform", ["log1p", "none"])
def test_fully_observed_expression_equals_that_of_the_source(adata, transform):
    schema = fit_schema(adata, transform=transform)
    partial = read_partial(adata, schema)
    expected = AnnDataSource(adata, schema, positions=False).expression(np.arange(adata.n_obs))
    np.testing.assert_allclose(partial.network, expected, atol=1e-5)
    np.testing.assert_array_equal(partial.values, adata.X.toarray())
    if transform == "log1p":
        np.testing.assert_allclose(partial.library_size, adata.X.toarray().sum(1))
    else:
        assert np.isnan(partial.library_size).all()


def test_nan_and_missing_genes_are_unobserved(adata):
    schema = fit_schema(adata)
    values = adata.X.toarray().astype(float)
    values[:7] = np.nan
    values[7:9, :5] = np.nan
    adata.X = values
    partial = read_partial(adata[:, ::-1][:, :20].copy(), schema)
    values[:, :5] = np.nan  # the first five genes of the schema are the last of these cells, which were left out
    np.testing.assert_array_equal(partial.values, values)
    np.testing.assert_array_equal(np.isnan(partial.network), np.isnan(values))
    assert np.isnan(partial.library_size[:7]).all()
    share = np.asarray(schema.gene_share)[5:].sum()
    np.testing.assert_allclose(partial.library_size[7:], np.nansum(values[7:], axis=1) / share)


def test_observed_genes_are_scaled_to_their_depth_in_the_reference(adata):
    """A cell of which half of the genes are known reads as the same cell of which that half was measured."""
    schema = fit_schema(adata)
    half = adata[:, :13].copy()
    with pytest.warns(UserWarning, match="12 of 25 genes"):
        source = AnnDataSource(half, schema, positions=False)
    expected = source.expression(np.arange(adata.n_obs))[:, :13]
    np.testing.assert_allclose(read_partial(half, schema).network[:, :13], expected, atol=1e-5)


def test_zeros_of_genes_that_a_slice_lacks_are_an_error(adata):
    measured = pd.DataFrame(True, index=adata.var_names, columns=["slice_0", "slice_1"])
    measured.iloc[:2, 1] = False
    schema = fit_schema(adata)
    adata.varm[_keys.MEASURED_IN] = measured
    with pytest.raises(ValueError, match="1 slices lack genes"):
        read_partial(adata, schema)


def test_invalid_values_are_an_error(adata):
    schema = fit_schema(adata)
    values = adata.X.toarray().astype(float)
    for bad, message in ((np.inf, "infinite"), (-1.0, "negative")):
        values[3, 3] = bad
        adata.X = sp.csr_matrix(values)
        with pytest.raises(ValueError, match=message):
            read_partial(adata, schema)
