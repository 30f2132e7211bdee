"""Counts from log-normalized values."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest
import scanpy as sc
import scipy.sparse as sp

from alphastomics.pp import restore_counts


@pytest.fixture
def counts():
    rng = np.random.default_rng(0)
    x = rng.poisson(rng.gamma(0.3, 4, size=(200, 60)))
    x[:, 0] = 1
    x[3] = 0  # an empty cell
    x[4] = 2 * x[4] + (x[4] > 0)  # no gene was counted once
    return x


def normalized(counts, *, storage=sp.csr_matrix, target_sum=1e4):
    adata = ad.AnnData(storage(counts.astype(np.float32)))
    sc.pp.normalize_total(adata, target_sum=target_sum)
    sc.pp.log1p(adata)
    return adata


@pytest.mark.filterwarnings("ignore:Some cells have zero counts:UserWarning")
@pytest.mark.parametrize("storage", [sp.csr_matrix, sp.csc_matrix, np.asarray])
@pytest.mark.parametrize("target_sum", [None, 1e4, 1e6])
def test_counts_are_restored_exactly(counts, storage, target_sum):
    adata = normalized(counts, storage=storage, target_sum=target_sum)
    before = adata.X.copy()
    assert restore_counts(adata) is None
    assert (adata.layers["counts"].toarray() == counts).all()
    assert (adata.X != before).sum() == 0


@pytest.mark.filterwarnings("ignore:Some cells have zero counts:UserWarning")
def test_a_layer_and_a_copy(counts):
    adata = normalized(counts)
    adata.layers["log"], adata.X = adata.X.copy(), None
    restored = restore_counts(adata, layer="log", key_added="n", copy=True)
    assert list(adata.layers) == ["log"]
    assert (restored.layers["n"].toarray() == counts).all()
    with pytest.raises(KeyError, match="missing"):
        restore_counts(adata, layer="counts")


@pytest.mark.filterwarnings("ignore:Some cells have zero counts:UserWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x + 0.1 * np.random.default_rng(0).random(x.shape), "cannot be restored"),
        (lambda x: x - 1, "negative"),
        (lambda x: 1000 * np.expm1(x), "are not logarithms"),
        (lambda x: 50 * np.expm1(x), "use raw counts"),
        (lambda x: x * np.nan, "NaN"),
    ],
)
def test_other_values_are_refused(counts, change, message):
    adata = normalized(counts, storage=np.asarray)
    adata.X = change(adata.X)
    with pytest.raises(ValueError, match=message):
        restore_counts(adata)
    assert not adata.layers
