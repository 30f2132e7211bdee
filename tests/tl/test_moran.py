"""``tl.morans_i``: slice by slice, on log1p, under ``uns``."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from alphastomics import tl
from alphastomics.metrics import log1p_normalized, median_library_size, morans_i


def test_each_slice_has_its_own_graph_and_depth(tissue):
    table = tl.morans_i(tissue, n_neighbors=4, copy=True)
    assert table.index.names == ["slice", "gene"]
    for name in ("slice_0", "slice_2"):
        part = tissue[tissue.obs["slice_id"] == name]
        x = log1p_normalized(part.X, median_library_size(part.X))
        expected = morans_i(x, part.obsm["spatial"], n_neighbors=4)
        assert table.loc[name].index.tolist() == tissue.var_names.tolist()
        np.testing.assert_allclose(table.loc[name]["I"], expected, atol=1e-12)


@pytest.mark.slow
def test_equals_squidpy(tissue):
    import squidpy

    part = tissue[tissue.obs["slice_id"] == "slice_1"].copy()
    part.X = log1p_normalized(part.X, median_library_size(part.X))
    squidpy.gr.spatial_neighbors_knn(part, n_neighs=6)
    expected = squidpy.gr.spatial_autocorr(part, mode="moran", copy=True, show_progress_bar=False)["I"]
    found = tl.morans_i(tissue, copy=True).loc["slice_1", "I"]
    np.testing.assert_allclose(found, expected.loc[found.index], atol=1e-6)


def test_cells_without_position_and_genes_without_measurement_are_left_out(tissue):
    cells = np.flatnonzero(tissue.obs["slice_id"] == "slice_0")
    expected = tl.morans_i(tissue[np.setdiff1d(np.arange(360), cells[:9]), 2:], copy=True)
    tissue.obsm["spatial"][cells[:9], 0] = np.nan
    x = tissue.X.toarray()
    x[:, :2] = np.nan
    tissue.X = x
    table = tl.morans_i(tissue, copy=True)
    unmeasured = table.index.isin(tissue.var_names[:2], level="gene")
    assert table["I"][unmeasured].isna().all()
    pd.testing.assert_frame_equal(table[~unmeasured], expected)


def test_a_small_slice_is_nan_and_the_table_survives_a_file(tissue, tmp_path):
    tissue.obs["part"] = np.where(np.arange(360) < 5, "few", "many")
    assert tl.morans_i(tissue, library_key="part") is None
    tissue.write_h5ad(tmp_path / "tissue.h5ad")
    table = ad.read_h5ad(tmp_path / "tissue.h5ad").uns["morans_i"]
    assert table.columns.tolist() == ["gene", "I"]
    assert table.loc["few", "I"].isna().all()
    assert table.loc["many", "I"].notna().all()


def test_missing_key_raises(tissue):
    with pytest.raises(KeyError, match=r'obsm\["x"\] .*spatial_key='):
        tl.morans_i(tissue, spatial_key="x")
