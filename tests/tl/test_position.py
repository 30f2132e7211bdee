"""``tl.position_scores``: which cells are scored, in which slices, where the table goes."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from alphastomics import tl
from alphastomics.metrics import chance_positions, oracle_positions, position_scores

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


def test_options_reach_the_scores(adata):
    options = {"n_neighbors": 5, "max_cells": 50, "random_state": 2}
    table = tl.position_scores(adata, copy=True, **options)
    assert table["n_cells"].tolist() == [50] * 3
    assert table.loc["slice_1", SCORES].to_dict() == expected_scores(adata, cells_of(adata, "slice_1"), **options)


def test_other_keys(adata):
    expected = tl.position_scores(adata, copy=True)
    for name, key in (("true", "spatial"), ("placed", "spatial_reconstructed")):
        adata.obsm[name] = adata.obsm.pop(key)
    pd.testing.assert_frame_equal(tl.position_scores(adata, "placed", spatial_key="true", copy=True), expected)


def test_library_key(adata):
    halves = np.arange(360) % 2 == 0
    adata.obs["half"] = np.where(halves, "even", "odd")
    table = tl.position_scores(adata, library_key="half", copy=True)
    assert table.index.tolist() == ["even", "odd"]
    assert table.loc["even", SCORES].to_dict() == expected_scores(adata, halves)
    # What tl.reconstruct wrote down comes before the default, and the argument before both.
    adata.uns["spatial_reconstructed"] = {"params": {"slice_key": "half"}}
    pd.testing.assert_frame_equal(tl.position_scores(adata, copy=True), table)
    assert len(tl.position_scores(adata, library_key="slice_id", copy=True)) == 3


def test_unplaced_cells_and_cells_without_a_truth_are_left_out(adata):
    first, second = cells_of(adata, "slice_0"), cells_of(adata, "slice_1")
    placed = ~first & ~(second & (np.arange(360) % 3 == 0))
    unknown = np.flatnonzero(second & placed)[:7]
    adata.obsm["spatial"][unknown, 1] = np.nan
    adata.obsm["spatial_reconstructed"][unknown[:3]] = np.nan
    adata.obs["spatial_reconstructed_placed"] = placed
    table = tl.position_scores(adata, copy=True)
    assert table[["n_cells", "n_skipped"]].T.to_dict("list") == {"slice_1": [73, 7], "slice_2": [120, 0]}
    scored = second & placed
    scored[unknown] = False
    # Known cells fix the frame of the second slice; the third has none and is realigned.
    assert table.loc["slice_1", SCORES].to_dict() == expected_scores(adata, scored, align=False)
    assert table.loc["slice_2", SCORES].to_dict() == expected_scores(adata, cells_of(adata, "slice_2"))
    pd.testing.assert_frame_equal(table, tl.evaluate(adata))


def test_baselines(adata):
    table = tl.position_scores(adata, baselines=True, cell_type_key="cell_type", random_state=3, copy=True)
    assert table.index.names == ["slice", "positions"]
    assert table.xs("slice_2").index.tolist() == ["prediction", "chance", "oracle"]
    cells = cells_of(adata, "slice_2")
    true, types = adata.obsm["spatial"][cells], adata.obs["cell_type"][cells]
    for kind, positions in (("chance", chance_positions(true, 3)), ("oracle", oracle_positions(true, types, 3))):
        assert table.loc[("slice_2", kind), SCORES].to_dict() == position_scores(true, positions, random_state=3)
    again = tl.evaluate(adata, baselines=True, cell_type_key="cell_type", random_state=3)
    pd.testing.assert_frame_equal(table, again)


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
        ({"library_key": "x"}, r'obs\["x"\].*library_key='),
        ({"cell_type_key": "x", "baselines": True}, r'obs\["x"\].*cell_type_key='),
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
