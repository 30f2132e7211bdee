"""``tl.expression_scores``: what is compared, on which scale, where the table goes."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from alphastomics import tl
from alphastomics.metrics import expression_scores
from alphastomics.metrics._position import chance_order, oracle_order


@pytest.fixture
def adata(tissue) -> ad.AnnData:
    """A prediction of the right mean at thrice the depth."""
    rng = np.random.default_rng(0)
    tissue.layers["predicted"] = sparse.csr_matrix(rng.poisson(3 * (tissue.X.toarray() + 0.1)).astype(np.float32))
    return tissue


def scaled(counts: np.ndarray, size: float) -> np.ndarray:
    counts = counts.astype(float)
    return np.log1p(size * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300))


def expected_scores(adata: ad.AnnData, name: str, genes: np.ndarray | slice = slice(None)) -> dict[str, float]:
    part = adata[adata.obs["slice_id"] == name]
    true, predicted = part.X.toarray()[:, genes], part.layers["predicted"].toarray()[:, genes]
    size = np.median(true.sum(axis=1)[true.sum(axis=1) > 0])
    return expression_scores(scaled(true, size), scaled(predicted, size))


def test_one_row_per_slice_on_log1p_at_the_median_library_size(adata):
    before = adata.copy()
    table = tl.expression_scores(adata, "predicted", copy=True)
    assert table.index.tolist() == ["slice_0", "slice_1", "slice_2"]
    assert table.index.name == "slice"
    assert table["n_cells"].tolist() == [120] * 3
    assert table["n_genes"].tolist() == [30] * 3
    for name in table.index:
        expected = expected_scores(adata, name)
        assert table.loc[name, list(expected)].to_dict() == pytest.approx(expected, abs=1e-9)
    assert set(adata.uns) == set(before.uns)
    np.testing.assert_array_equal(adata.X.toarray(), before.X.toarray())


def test_depth_of_the_prediction_does_not_matter(adata):
    table = tl.expression_scores(adata, "predicted", copy=True)
    adata.layers["predicted"] = adata.layers["predicted"] * 7.5
    pd.testing.assert_frame_equal(tl.expression_scores(adata, "predicted", copy=True), table)
    plain = tl.expression_scores(adata, "predicted", transform="none", copy=True)
    assert (plain["expression_mse"] > 10 * table["expression_mse"]).all()


def test_values_other_than_counts_are_not_transformed(adata):
    adata.X = adata.X.toarray() - 0.5
    table = tl.expression_scores(adata, "predicted", copy=True)
    pd.testing.assert_frame_equal(table, tl.expression_scores(adata, "predicted", transform="none", copy=True))
    with pytest.raises(ValueError, match="negative"):
        tl.expression_scores(adata, "predicted", transform="log1p")


def test_baselines_are_other_cells(adata):
    table = tl.expression_scores(
        adata, "predicted", baselines=True, cell_type_key="cell_type", random_state=3, copy=True
    )
    assert table.index.names == ["slice", "expression"]
    assert table.xs("slice_1").index.tolist() == ["prediction", "chance", "oracle"]
    part = adata[adata.obs["slice_id"] == "slice_1"].copy()
    for kind, order in (
        ("chance", chance_order(120, 3)),
        ("oracle", oracle_order(120, part.obs["cell_type"].to_numpy(), 3)),
    ):
        part.layers["predicted"] = part.X[order]
        expected = expected_scores(part, "slice_1")
        assert table.loc[("slice_1", kind), list(expected)].to_dict() == pytest.approx(expected, abs=1e-9)
    correlation = table["pearson_gene"].xs("slice_1")
    assert correlation["chance"] < correlation["oracle"] < correlation["prediction"]


@pytest.mark.parametrize("store", [np.asarray, sparse.csr_matrix])
def test_unmeasured_genes_are_left_out(adata, store):
    kept = np.arange(30) >= 4
    expected = expected_scores(adata, "slice_1", kept)
    others = tl.expression_scores(adata, "predicted", copy=True).loc[["slice_0", "slice_2"]]
    x = adata.X.toarray()
    x[np.ix_(adata.obs["slice_id"] == "slice_1", ~kept)] = np.nan
    adata.X = store(x)
    table = tl.expression_scores(adata, "predicted", copy=True)
    assert table["n_genes"].tolist() == [30, 26, 30]
    assert table.loc["slice_1", list(expected)].to_dict() == pytest.approx(expected, abs=1e-9)
    pd.testing.assert_frame_equal(table.loc[["slice_0", "slice_2"]], others)
    x[0, 5] = np.nan
    adata.X = store(x)
    with pytest.raises(ValueError, match=rf"gene '{adata.var_names[5]}'.* 1 of 120"):
        tl.expression_scores(adata, "predicted")


def test_another_object_is_matched_by_name(adata):
    cells, genes = np.random.default_rng(0).permutation(360), np.random.default_rng(1).permutation(30)[:20]
    other = ad.AnnData(
        adata.layers["predicted"][cells][:, genes], obs=adata.obs[[]].iloc[cells], var=adata.var[[]].iloc[genes]
    )
    table = tl.expression_scores(adata, other, copy=True)
    assert table["n_genes"].tolist() == [20] * 3
    expected = expected_scores(adata, "slice_0", np.sort(genes))
    assert table.loc["slice_0", list(expected)].to_dict() == pytest.approx(expected, abs=1e-9)
    other.layers["draw"], other.X = other.X, None
    pd.testing.assert_frame_equal(tl.expression_scores(adata, other, prediction_layer="draw", copy=True), table)
    with pytest.raises(KeyError, match="1 of 360 cells.*prediction"):
        tl.expression_scores(adata, other[1:], prediction_layer="draw")
    other.var_names = [f"other_{name}" for name in other.var_names]
    with pytest.raises(ValueError, match="var_names"):
        tl.expression_scores(adata, other, prediction_layer="draw")


@pytest.mark.parametrize("baselines", [False, True])
def test_table_in_uns_survives_a_file(adata, baselines, tmp_path):
    assert tl.expression_scores(adata, "predicted", baselines=baselines) is None
    table = tl.expression_scores(adata, "predicted", baselines=baselines, copy=True)
    adata.write_h5ad(tmp_path / "tissue.h5ad")
    read = ad.read_h5ad(tmp_path / "tissue.h5ad").uns["expression_scores"]
    if baselines:
        read = read.set_index("expression", append=True)
    assert read.index.tolist() == table.index.tolist()
    pd.testing.assert_frame_equal(read.reset_index(drop=True), table.reset_index(drop=True))


def test_missing_keys_raise(adata):
    with pytest.raises(KeyError, match=r'layers\["x"\] .*prediction='):
        tl.expression_scores(adata, "x")
    with pytest.raises(KeyError, match=r'obs\["x"\] .*library_key='):
        tl.expression_scores(adata, "predicted", library_key="x")
    with pytest.raises(ValueError, match="prediction_layer="):
        tl.expression_scores(adata, "predicted", prediction_layer="x")
