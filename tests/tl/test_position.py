"""``tl.position_scores``: which cells are scored, in which slices, where the table goes."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from alphastomics import tl
from alphastomics.metrics import position_scores

SCORES = list(position_scores(np.zeros((1, 2)), np.zeros((1, 2))))


@pytest.fixture
def adata(tissue) -> ad.AnnData:
    """Three slices of 120 cells, placed with an error, each in a frame that is turned and shifted."""
    rng = np.random.default_rng(0)
    turned = tissue.obsm["spatial"] @ [[0.0, 1.0], [-1.0, 0.0]] + [500.0, -300.0]
    tissue.obsm["spatial_reconstructed"] = turned + rng.normal(scale=60, size=turned.shape)
    return tissue


def expected_scores(adata: ad.AnnData, cells: np.ndarray, **options) -> dict[str, float]:
    return position_scores(adata.obsm["spatial"][cells], adata.obsm["spatial_reconstructed"][cells], **options)


def cells_of(adata: ad.AnnData, name: str) -> np.ndarray:
    return (adata.obs["slice_id"] == name).to_numpy()


def test_one_row_per_slice_of_the_scores_of_metrics(adata):
    before = adata.copy()
    table = tl.position_scores(adata, copy=True)
    assert table.index.tolist() == ["slice_0", "slice_1", "slice_2"]
    assert table.index.name == "slice"
    assert list(table.columns) == ["n_cells", "n_skipped", *SCORES]
    assert table["n_cells"].tolist() == [120] * 3
    for name in table.index:
        assert table.loc[name, SCORES].to_dict() == expected_scores(adata, cells_of(adata, name))
    assert set(adata.uns) == set(before.uns)
    pd.testing.assert_frame_equal(adata.obs, before.obs)
    assert list(adata.obsm) == list(before.obsm)


@pytest.mark.parametrize(
    "options",
    [
        {"n_neighbors": 5, "max_cells": 50, "random_state": 2},
        {"library_key": "half"},
        {"baselines": True, "cell_type_key": "cell_type", "random_state": 3},
    ],
)
def test_options_match_evaluate(adata, options):
    adata.obs["half"] = np.where(np.arange(360) % 2 == 0, "even", "odd")
    adata.obs["spatial_reconstructed_placed"] = ~cells_of(adata, "slice_0")
    pd.testing.assert_frame_equal(tl.position_scores(adata, copy=True, **options), tl.evaluate(adata, **options))


def test_other_keys(adata):
    expected = tl.position_scores(adata, copy=True)
    for name, key in (("true", "spatial"), ("placed", "spatial_reconstructed")):
        adata.obsm[name] = adata.obsm.pop(key)
    pd.testing.assert_frame_equal(tl.position_scores(adata, "placed", spatial_key="true", copy=True), expected)


@pytest.mark.parametrize("baselines", [False, True])
def test_table_in_uns_survives_a_file(adata, baselines, tmp_path):
    assert tl.position_scores(adata, baselines=baselines) is None
    assert tl.position_scores(adata, baselines=baselines, key_added="mine") is None
    table = tl.position_scores(adata, baselines=baselines, copy=True)
    adata.write_h5ad(tmp_path / "tissue.h5ad")
    uns = ad.read_h5ad(tmp_path / "tissue.h5ad").uns
    for key in ("position_scores", "mine"):
        read = uns[key].set_index("positions", append=True) if baselines else uns[key]
        assert read.index.tolist() == table.index.tolist()
        pd.testing.assert_frame_equal(read.reset_index(drop=True), table.reset_index(drop=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prediction": "x"}, r'obsm\["x"\].*tl\.reconstruct.*prediction='),
        ({"spatial_key": "x"}, r'obsm\["x"\].*spatial_key='),
    ],
)
def test_missing_keys_raise(adata, arguments, message):
    with pytest.raises(KeyError, match=message):
        tl.position_scores(adata, **arguments)
    assert "position_scores" not in adata.uns


def test_positions_of_other_dimension_or_not_finite_raise(adata):
    adata.obsm["deep"] = np.zeros((360, 3))
    with pytest.raises(ValueError, match=r"\(360, 2\).*\(360, 3\).*spatial_key="):
        tl.position_scores(adata, "deep")
    adata.obsm["nowhere"] = np.full((360, 2), np.nan)
    with pytest.raises(ValueError, match=r'obsm\["nowhere"\].*spatial_key='):
        tl.position_scores(adata, spatial_key="nowhere")
    with pytest.raises(ValueError, match=r'obsm\["nowhere"\] .*120 cells of slice \'slice_0\''):
        tl.position_scores(adata, "nowhere")
    assert "position_scores" not in adata.uns
