"""``tl.modality_agreement``: scores of samples against real slices."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pytest

from alphastomics import tl
from alphastomics.metrics import log1p_normalized, median_library_size, modality_agreement
from alphastomics.metrics._position import chance_order


@pytest.fixture
def sample(tissue) -> ad.AnnData:
    return tissue[tissue.obs["slice_id"] == "slice_0"].copy()


@pytest.fixture
def reference(tissue) -> ad.AnnData:
    return tissue[tissue.obs["slice_id"] != "slice_0"].copy()


def direct(sample: ad.AnnData, reference: ad.AnnData, name: str, order=slice(None)) -> float:
    size = median_library_size(reference.X)
    part = reference[reference.obs["slice_id"] == name]
    x, y = (log1p_normalized(each.X, size) for each in (sample, part))
    return modality_agreement(x, sample.obsm["spatial"][order], y, part.obsm["spatial"])


def test_mean_over_reference_slices_with_baselines(sample, reference):
    table = tl.modality_agreement(sample, reference, baselines=True, copy=True)
    assert table.index.tolist() == [
        ("slice_0", "sample"), ("slice_0", "chance"), ("slice_1", "ceiling"), ("slice_2", "ceiling"),
    ]  # fmt: skip
    found = table["modality_agreement"]
    names = ("slice_1", "slice_2")
    for kind, order in (("sample", slice(None)), ("chance", chance_order(120, 0))):
        expected = np.mean([direct(sample, reference, name, order) for name in names])
        assert found["slice_0", kind] == pytest.approx(expected, abs=1e-9)
    other = reference[reference.obs["slice_id"] == "slice_1"]
    assert found["slice_1", "ceiling"] == pytest.approx(direct(other, reference, "slice_2"), abs=1e-9)
    assert abs(found["slice_0", "chance"]) < 0.1
    assert found["slice_0", "sample"] > 0.2  # 25 neighbors are a fifth of these slices
    assert table["n_cells"].tolist() == [120] * 4


def test_one_reference_slice_has_no_ceiling(sample, reference):
    one = reference[reference.obs["slice_id"] == "slice_1"].copy()
    table = tl.modality_agreement(sample, one, baselines=True, copy=True)
    assert table.index.get_level_values("tissue").tolist() == ["sample", "chance"]
    del one.obs["slice_id"]
    assert tl.modality_agreement(sample, one, copy=True).iloc[0, 1] == pytest.approx(
        table.loc[("slice_0", "sample"), "modality_agreement"]
    )


def test_genes_are_matched_by_name_and_unmeasured_ones_left_out(sample, reference):
    expected = tl.modality_agreement(sample[:, 3:], reference[:, 3:], copy=True)
    shuffled = reference[:, np.random.default_rng(0).permutation(30)].copy()
    x = sample.X.toarray()
    x[:, :3] = np.nan
    sample.X = x
    found = tl.modality_agreement(sample, shuffled, copy=True)
    np.testing.assert_allclose(found.to_numpy(), expected.to_numpy(), atol=1e-6)


def test_genes_that_a_prediction_does_not_measure_are_left_out(sample, reference):
    predicted = sample.X.toarray()
    predicted[:, 2] = np.nan
    sample.layers["predicted"] = predicted
    options = {"prediction": None, "expression_layer": "predicted"}
    kept = np.delete(np.arange(30), 2)
    found = tl.evaluate(sample, reference=reference, **options)["modality_agreement"]
    expected = tl.evaluate(sample[:, kept].copy(), reference=reference[:, kept].copy(), **options)["modality_agreement"]
    np.testing.assert_allclose(found, expected)


def test_cells_without_a_position_are_left_out(sample, reference):
    expected = tl.modality_agreement(sample[10:], reference[7:], copy=True)
    sample.obsm["spatial"][:10] = np.nan
    reference.obsm["spatial"][:7] = np.nan
    np.testing.assert_allclose(tl.modality_agreement(sample, reference, copy=True), expected, atol=1e-9)
    sample.obsm["spatial"][:] = np.nan
    with pytest.raises(ValueError, match="positions.*NaN"):
        tl.modality_agreement(sample, reference)


def test_table_in_uns_survives_a_file(sample, reference, tmp_path):
    assert tl.modality_agreement(sample, reference, baselines=True) is None
    sample.write_h5ad(tmp_path / "tissue.h5ad")
    table = ad.read_h5ad(tmp_path / "tissue.h5ad").uns["modality_agreement"]
    assert table.columns.tolist() == ["tissue", "n_cells", "modality_agreement"]
    assert table.index.tolist() == ["slice_0", "slice_0", "slice_1", "slice_2"]


def test_invalid_input_raises(sample, reference):
    with pytest.raises(KeyError, match=r'obsm\["x"\] .*spatial_key='):
        tl.modality_agreement(sample, reference, spatial_key="x")
    reference.X = reference.X * 0
    with pytest.raises(ValueError, match="reference.*layer="):
        tl.modality_agreement(sample, reference)
