"""Moran's I against the dense formula and squidpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import sparse
from scipy.stats import pearsonr
from sklearn.neighbors import kneighbors_graph

from alphastomics.metrics import _distances, moran_correlation, morans_i


def patterned(n: int = 120, n_genes: int = 9, n_dims: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Counts whose genes follow a gradient more or less, and positions."""
    rng = np.random.default_rng(seed)
    positions = rng.uniform(-1, 1, size=(n, n_dims))
    slopes = np.linspace(0, 3, n_genes)
    return rng.poisson(np.exp(positions[:, :1] * slopes)) + 0.0, positions


def dense_formula(x: np.ndarray, positions: np.ndarray, k: int) -> np.ndarray:
    w = kneighbors_graph(positions, k).toarray() / k
    z = x - x.mean(axis=0)
    return len(x) / w.sum() * np.einsum("ij,ig,jg->g", w, z, z) / np.square(z).sum(axis=0)


@pytest.mark.parametrize("store", [np.asarray, sparse.csr_matrix, sparse.csc_matrix, np.float32])
@pytest.mark.parametrize(("k", "n_dims"), [(1, 2), (6, 2), (6, 3), (119, 2)])
def test_equals_the_dense_formula(store, k, n_dims):
    x, positions = patterned(n_dims=n_dims)
    expected = dense_formula(x, positions, k)
    assert k == 119 or np.ptp(expected) > 0.3
    np.testing.assert_allclose(morans_i(store(x), positions, n_neighbors=k), expected, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("store", [np.asarray, sparse.csr_matrix])
def test_equals_squidpy(store):
    import squidpy
    from anndata import AnnData

    x, positions = patterned(n=300)
    adata = AnnData(store(x), obsm={"spatial": positions})
    squidpy.gr.spatial_neighbors_knn(adata, n_neighs=6)
    table = squidpy.gr.spatial_autocorr(adata, mode="moran", copy=True, show_progress_bar=False)
    expected = table.loc[adata.var_names, "I"].to_numpy()
    np.testing.assert_allclose(morans_i(adata.X, positions), expected, atol=1e-6)


def test_blocks_of_genes_change_nothing(monkeypatch):
    x, positions = patterned()
    expected = morans_i(x, positions)
    for entries in (1, 250):
        monkeypatch.setattr(_distances, "CHUNK_ENTRIES", entries)
        for stored in (x, sparse.csr_matrix(x)):
            np.testing.assert_allclose(morans_i(stored, positions), expected, rtol=1e-12)


@pytest.mark.parametrize("store", [np.asarray, sparse.csr_matrix])
def test_constant_and_unmeasured_genes_have_none(store):
    x, positions = patterned()
    expected = morans_i(x, positions)
    x[:, 2], x[:, 5] = 0.1, np.nan
    result = morans_i(store(x), positions)
    assert np.flatnonzero(np.isnan(result)).tolist() == [2, 5]
    others = ~np.isnan(result)
    np.testing.assert_allclose(result[others], expected[others], rtol=1e-12)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), factor=st.floats(0.01, 100))
def test_depends_on_neither_frame_nor_order(seed, factor):
    x, positions = patterned(seed=seed)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))
    turn = np.linalg.qr(rng.normal(size=(2, 2)))[0]
    again = morans_i(x[order], factor * positions[order] @ turn + 3)
    np.testing.assert_allclose(again, morans_i(x, positions), atol=1e-9)


def test_correlation_is_over_the_genes_of_both_sides():
    (x, p), (y, q) = patterned(seed=1), patterned(n=90, seed=2)
    a, b = morans_i(x, p), morans_i(y, q)
    assert moran_correlation(x, p, y, q) == pytest.approx(pearsonr(a, b).statistic, abs=1e-9)
    y[:, 0], x[:, 4] = 0, np.nan
    kept = ~np.isin(np.arange(9), [0, 4])
    assert moran_correlation(x, p, y, q) == pytest.approx(pearsonr(a[kept], b[kept]).statistic, abs=1e-9)
    assert np.isnan(moran_correlation(x[:, :1], p, y[:, :1], q))


def test_floor_and_ceiling_on_a_tissue(tissue):
    parts = [tissue[tissue.obs["slice_id"] == name] for name in ("slice_0", "slice_1")]
    (x, p), (y, q) = ((part.X, part.obsm["spatial"]) for part in parts)
    shuffled = np.random.default_rng(0).permutation(q)
    assert moran_correlation(x, p, x, p) == pytest.approx(1)
    assert moran_correlation(x, p, y, q) > 0.6
    assert abs(moran_correlation(x, p, y, shuffled)) < 0.4


def test_invalid_input_raises():
    x, positions = patterned()
    with pytest.raises(ValueError, match=r"\(120, n_dims\).*\(119, 2\)"):
        morans_i(x, positions[1:])
    with pytest.raises(ValueError, match="n_neighbors=120"):
        morans_i(x, positions, n_neighbors=120)
    with pytest.raises(ValueError, match="9 .*8 genes"):
        moran_correlation(x, positions, x[:, 1:], positions)
    positions[0, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        morans_i(x, positions)
