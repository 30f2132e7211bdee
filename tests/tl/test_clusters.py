"""``tl.cluster_scores``: which cells are scored, and against what."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from alphastomics import tl
from alphastomics.metrics import cluster_scores
from alphastomics.metrics._position import chance_order


@pytest.fixture
def adata(tissue) -> ad.AnnData:
    rng = np.random.default_rng(0)
    codes = tissue.obs["cell_type"].cat.codes.to_numpy()
    clusters = np.where(rng.random(360) < 0.3, rng.integers(5, size=360), codes).astype(str)
    tissue.obs["leiden"] = pd.Categorical(clusters)
    return tissue


def test_one_row_per_slice_over_the_cells_that_have_both(adata):
    adata.obs.loc[adata.obs_names[[0, 3]], "leiden"] = np.nan
    adata.obs.loc[adata.obs_names[[3, 5]], "cell_type"] = np.nan
    table = tl.cluster_scores(adata, "leiden", copy=True)
    assert table["n_cells"].tolist() == [117, 120, 120]
    assert table["n_skipped"].tolist() == [3, 0, 0]
    part = adata.obs[(adata.obs["slice_id"] == "slice_0") & adata.obs[["leiden", "cell_type"]].notna().all(axis=1)]
    expected = cluster_scores(part["cell_type"].to_numpy(), part["leiden"].to_numpy())
    assert table.loc["slice_0", list(expected)].to_dict() == pytest.approx(expected)
    assert "cluster_scores" not in adata.uns


def test_chance_permutes_the_clusters(adata):
    table = tl.cluster_scores(adata, "leiden", baselines=True, random_state=2, copy=True)
    part = adata.obs[adata.obs["slice_id"] == "slice_2"]
    expected = cluster_scores(part["cell_type"].to_numpy(), part["leiden"].to_numpy()[chance_order(120, 2)])
    assert table.loc[("slice_2", "chance"), list(expected)].to_dict() == pytest.approx(expected)
    assert (
        table.loc[("slice_2", "chance"), "adjusted_rand"] < 0.1 < table.loc[("slice_2", "prediction"), "adjusted_rand"]
    )


def test_table_in_uns_survives_a_file(adata, tmp_path):
    assert tl.cluster_scores(adata, "leiden", baselines=True, key_added="mine") is None
    adata.write_h5ad(tmp_path / "tissue.h5ad")
    table = ad.read_h5ad(tmp_path / "tissue.h5ad").uns["mine"].set_index("clusters", append=True)
    expected = tl.cluster_scores(adata, "leiden", baselines=True, copy=True)
    assert table.index.tolist() == expected.index.tolist()
    np.testing.assert_array_equal(table.to_numpy(), expected.to_numpy())


def test_missing_keys_raise(adata):
    with pytest.raises(KeyError, match=r'obs\["x"\] .*cluster_key='):
        tl.cluster_scores(adata, "x")
    with pytest.raises(KeyError, match=r'obs\["x"\] .*label_key='):
        tl.cluster_scores(adata, "leiden", label_key="x")
