"""``tl.evaluate``: which cells are scored, in which slices, against what."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData

from alphastomics import tl
from alphastomics.metrics import (
    chance_positions,
    cluster_scores,
    morans_i,
    niche_scores,
    oracle_positions,
    position_scores,
    spread_scores,
    subsample_cells,
)
from alphastomics.metrics._position import chance_order
from alphastomics.tl._evaluate import evaluate
from alphastomics.tl._expression import read_pair

SCORES = list(position_scores(np.zeros((1, 2)), np.zeros((1, 2))))
NICHES = list(niche_scores(np.zeros((1, 2)), np.zeros((1, 2)), ["a"]))
SPREAD = ["coverage", "spread_over_error", "spread_spearman"]


@pytest.fixture
def adata() -> AnnData:
    """Two slices of 40 and 60 cells, interleaved, without expression."""
    rng = np.random.default_rng(0)
    true = rng.uniform(size=(100, 2))
    slices = pd.Categorical(np.where(np.arange(100) % 5 < 2, "left", "right"), categories=["right", "left", "unused"])
    obs = pd.DataFrame(
        {"slice_id": slices, "type": np.array(["a", "b"])[(true[:, 0] > 0.5).astype(int)], "animal": 1},
        index=[f"cell{i}" for i in range(100)],
    )
    obsm = {"spatial": true, "spatial_reconstructed": true @ [[0, 2], [-2, 0]] + rng.normal(scale=0.2, size=true.shape)}
    return AnnData(obs=obs, obsm=obsm)


def scores_of(adata: AnnData, cells: np.ndarray, **options) -> list[float]:
    pair = adata.obsm["spatial"][cells], adata.obsm["spatial_reconstructed"][cells]
    return list(position_scores(*pair, **options).values())


def test_one_row_per_slice(adata):
    before = adata.copy()
    table = evaluate(adata)
    assert list(table.index) == ["left", "right"]
    assert table.index.name == "slice"
    assert list(table.columns) == ["n_cells", "n_skipped", *SCORES]
    assert table["n_cells"].tolist() == [40, 60]
    assert table["n_skipped"].tolist() == [0, 0]
    for name in table.index:
        expected = scores_of(adata, (adata.obs["slice_id"] == name).to_numpy())
        assert table.loc[name, SCORES].tolist() == pytest.approx(expected)
    pd.testing.assert_frame_equal(adata.obs, before.obs)
    assert not adata.uns


def test_options_reach_the_scores(adata):
    table = evaluate(adata, n_neighbors=5, max_cells=30, random_state=2)
    assert table["n_cells"].tolist() == [30, 30]
    cells = (adata.obs["slice_id"] == "left").to_numpy()
    expected = scores_of(adata, cells, n_neighbors=5, max_cells=30, random_state=2)
    assert table.loc["left", SCORES].tolist() == pytest.approx(expected)


def test_other_keys(adata):
    adata.obsm["a"], adata.obsm["b"] = adata.obsm["spatial"], adata.obsm["spatial_reconstructed"]
    expected = evaluate(adata)
    del adata.obsm["spatial"], adata.obsm["spatial_reconstructed"]
    pd.testing.assert_frame_equal(evaluate(adata, truth="a", prediction="b"), expected)


def test_default_of_library_key(adata):
    assert evaluate(adata, library_key="animal").index.tolist() == ["1"]
    adata.uns["spatial_reconstructed"] = {"params": {"slice_key": "animal"}}
    assert evaluate(adata).index.tolist() == ["1"]
    assert evaluate(adata, library_key="slice_id").index.tolist() == ["left", "right"]
    adata.uns["spatial_reconstructed"]["params"]["slice_key"] = "gone"
    assert evaluate(adata).index.tolist() == ["left", "right"]
    del adata.uns["spatial_reconstructed"], adata.obs["slice_id"]
    table = evaluate(adata)
    assert table.index.tolist() == ["slice_0"]
    assert table.loc["slice_0", SCORES].tolist() == pytest.approx(scores_of(adata, np.ones(100, dtype=bool)))


def test_cells_without_a_slice_form_one(adata):
    slices = adata.obs["slice_id"].astype(object)
    slices.iloc[:30] = np.nan
    adata.obs["slice_id"] = slices
    table = evaluate(adata)
    assert table["n_cells"].to_dict() == {"left": 28, "right": 42, "unassigned": 30}


def test_only_placed_cells_are_scored_and_their_frame_is_kept(adata):
    left = (adata.obs["slice_id"] == "left").to_numpy()
    placed = ~left | (np.arange(100) % 20 > 0)
    adata.obs["spatial_reconstructed_placed"] = placed
    table = evaluate(adata)
    assert table["n_cells"].to_dict() == {"right": 60, "left": 35}
    # "right" had no known cell: it is realigned. "left" had: the plain difference counts.
    assert table.loc["right", SCORES].tolist() == pytest.approx(scores_of(adata, ~left))
    assert table.loc["left", SCORES].tolist() == pytest.approx(scores_of(adata, left & placed, align=False))
    assert table.loc["left", "aligned_rmsd"] > 2 * table.loc["right", "aligned_rmsd"]


def test_a_slice_without_a_placed_cell_has_no_row(adata):
    adata.obs["spatial_reconstructed_placed"] = (adata.obs["slice_id"] == "left").to_numpy()
    assert evaluate(adata).index.tolist() == ["left"]
    adata.obs["spatial_reconstructed_placed"] = False
    with pytest.raises(ValueError, match=r'obs\["spatial_reconstructed_placed"\]'):
        evaluate(adata)


def test_placed_must_be_boolean(adata):
    adata.obs["spatial_reconstructed_placed"] = pd.Series([True, None] * 50, index=adata.obs_names, dtype=object)
    with pytest.raises(ValueError, match="spatial_reconstructed_placed"):
        evaluate(adata)


def test_cells_without_a_truth_are_skipped_and_counted(adata):
    right = np.flatnonzero(adata.obs["slice_id"] == "right")
    adata.obsm["spatial"][right[:7], 1] = np.nan
    adata.obsm["spatial_reconstructed"][right[:3]] = np.nan
    table = evaluate(adata)
    assert table[["n_cells", "n_skipped"]].loc["right"].tolist() == [53, 7]
    assert table.loc["right", SCORES].tolist() == pytest.approx(scores_of(adata, right[7:]))


def test_cells_that_were_not_placed_are_skipped_and_counted(adata, caplog):
    right = np.flatnonzero(adata.obs["slice_id"] == "right")
    adata.obsm["spatial_reconstructed"][right[:7]] = np.nan
    adata.obs["spatial_reconstructed_confidence"] = 0.5
    with caplog.at_level("INFO", logger="alphastomics"):
        table = evaluate(adata)
    assert table[["n_cells", "n_skipped"]].loc["right"].tolist() == [53, 7]
    assert table.loc["right", SCORES].tolist() == pytest.approx(scores_of(adata, right[7:]))
    assert "7 cells were not placed" in caplog.text


def test_a_slice_without_truth_keeps_its_row(adata):
    adata.obsm["spatial"][(adata.obs["slice_id"] == "left").to_numpy()] = np.nan
    table = evaluate(adata, baselines=True)
    assert table.loc[("left", "prediction"), ["n_cells", "n_skipped"]].tolist() == [0, 40]
    assert table.loc["left"][SCORES].isna().all(axis=None)
    adata.obsm["spatial"][:] = np.nan
    with pytest.raises(ValueError, match=r'obsm\["spatial"\].*truth='):
        evaluate(adata)


@pytest.mark.parametrize(("key", "value"), [("spatial_reconstructed", np.nan), ("spatial", np.inf)])
def test_infinite_and_missing_positions_raise(adata, key, value):
    cells = np.flatnonzero(adata.obs["slice_id"] == "left")[:7]
    adata.obsm[key][cells, 0] = value
    with pytest.raises(ValueError, match=rf'obsm\["{key}"\].*7 cells of slice \'left\' \(cell0, cell1, .*…\)'):
        evaluate(adata)


def test_baselines(adata):
    table = evaluate(adata, baselines=True, cell_type_key="type", random_state=3)
    assert table.index.names == ["slice", "positions"]
    assert table.xs("left").index.tolist() == ["prediction", "chance", "oracle"]
    pd.testing.assert_frame_equal(table.xs("prediction", level="positions"), evaluate(adata, random_state=3))
    cells = (adata.obs["slice_id"] == "left").to_numpy()
    true, types = adata.obsm["spatial"][cells], adata.obs["type"][cells]
    for kind, positions in (("chance", chance_positions(true, 3)), ("oracle", oracle_positions(true, types, 3))):
        expected = list(position_scores(true, positions, random_state=3).values())
        assert table.loc[("left", kind), SCORES].tolist() == pytest.approx(expected)
    by_kind = table["distance_spearman"].xs("right")
    assert by_kind["chance"] < by_kind["oracle"] < by_kind["prediction"]


def test_the_oracle_needs_cell_types(adata):
    assert "oracle" not in evaluate(adata, baselines=True).index.get_level_values("positions")
    adata.uns["spatial_reconstructed"] = {"params": {"cell_type_key": "type"}}
    assert "oracle" in evaluate(adata, baselines=True).index.get_level_values("positions")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"truth": "x"}, r'obsm\["x"\].*truth='),
        ({"prediction": "x"}, r'obsm\["x"\].*tl\.reconstruct.*prediction='),
        ({"library_key": "x"}, r'obs\["x"\].*library_key='),
        ({"cell_type_key": "x", "baselines": True}, r'obs\["x"\].*cell_type_key='),
    ],
)
def test_missing_keys_raise(adata, options, message):
    with pytest.raises(KeyError, match=message):
        evaluate(adata, **options)


def test_truth_and_prediction_must_have_the_same_dimension(adata):
    adata.obsm["spatial_reconstructed"] = np.zeros((100, 3))
    with pytest.raises(ValueError, match=r"\(100, 2\).*\(100, 3\)"):
        evaluate(adata)


@pytest.mark.parametrize("key", ["spatial", "spatial_reconstructed"])
def test_a_third_column_that_is_constant_within_each_slice_is_left_out(adata, key):
    expected = evaluate(adata, baselines=True)
    height = adata.obs["slice_id"].cat.codes.to_numpy(dtype=float)
    adata.obsm[key] = np.c_[adata.obsm[key], height]
    pd.testing.assert_frame_equal(evaluate(adata, baselines=True), expected)
    adata.obsm[key][0, 2] = 9.0
    with pytest.raises(ValueError, match=r"equal dimension"):
        evaluate(adata)


def test_a_file_and_a_view_give_the_same_table(adata, tmp_path):
    """What h5ad makes of the columns, and a subset without a copy."""
    import anndata as ad

    adata.obs["spatial_reconstructed_placed"] = np.arange(100) % 2 == 0
    adata.write_h5ad(tmp_path / "tissue.h5ad")
    pd.testing.assert_frame_equal(evaluate(ad.read_h5ad(tmp_path / "tissue.h5ad")), evaluate(adata))
    left = adata[adata.obs["slice_id"] == "left"]
    pd.testing.assert_frame_equal(evaluate(left), evaluate(adata).loc[["left"]])


def test_an_uncertainty_is_compared_with_the_error(adata):
    plain = evaluate(adata, baselines=True)
    left = np.flatnonzero(adata.obs["slice_id"] == "left")
    right = np.flatnonzero(adata.obs["slice_id"] == "right")
    u = np.random.default_rng(5).uniform(0.5, 2, size=100)
    u[left[:4]] = np.nan
    adata.obs["spatial_reconstructed_uncertainty"] = u
    adata.obsm["spatial"][right[:2]] = np.nan
    adata.obs["spatial_reconstructed_placed"] = ~np.isin(np.arange(100), left[4:6])
    table = evaluate(adata, baselines=True, max_cells=35)
    assert list(table.columns) == [*plain.columns, *SPREAD]
    # "right" is realigned; "left" has known cells, and its frame is kept.
    for name, scored, align in (("right", right[2:], True), ("left", np.delete(left, [4, 5]), False)):
        cells = scored[subsample_cells(len(scored), 35)]
        pair = adata.obsm["spatial"][cells], adata.obsm["spatial_reconstructed"][cells]
        expected = spread_scores(*pair, u[cells], align=align)
        assert table.loc[(name, "prediction"), SPREAD].to_dict() == pytest.approx(expected)
        assert np.isfinite(list(expected.values())).all()
    assert table.xs("chance", level="positions")[SPREAD].isna().all(axis=None)
    pd.testing.assert_frame_equal(
        tl.position_scores(adata, baselines=True, max_cells=35, copy=True), table, check_like=False
    )


def test_an_uncertainty_of_other_positions_is_not_read(adata):
    adata.obs["spatial_reconstructed_uncertainty"] = np.linspace(1, 2, 100)
    adata.obsm["other"] = adata.obsm["spatial_reconstructed"]
    for prediction in ("other", "spatial"):
        assert list(evaluate(adata, prediction=prediction).columns) == ["n_cells", "n_skipped", *SCORES]


@pytest.mark.parametrize("value", [-1.0, np.inf, "far"])
def test_an_invalid_uncertainty_raises(adata, value):
    adata.obs["spatial_reconstructed_uncertainty"] = value
    with pytest.raises(ValueError, match=r'obs\["spatial_reconstructed_uncertainty"\]'):
        evaluate(adata)


def with_expression(tissue: AnnData) -> AnnData:
    """Positions and expression predicted, clusters found."""
    rng = np.random.default_rng(0)
    tissue.obsm["spatial_reconstructed"] = tissue.obsm["spatial"] + rng.normal(scale=80, size=(360, 2))
    tissue.layers["predicted"] = rng.poisson(tissue.X.toarray() + 0.1).astype(float)
    codes = tissue.obs["cell_type"].cat.codes.to_numpy()
    tissue.obs["leiden"] = np.where(rng.random(360) < 0.3, rng.integers(5, size=360), codes).astype(str)
    return tissue


def test_only_positions_are_read_by_default(adata):
    """Byte for byte the table of positions, from an object without expression."""
    plain = evaluate(adata, baselines=True, cell_type_key="type")
    assert list(plain.columns) == ["n_cells", "n_skipped", *SCORES]
    for row in plain.itertuples():
        true = adata.obsm["spatial"][(adata.obs["slice_id"] == row.Index[0]).to_numpy()]
        if row.Index[1] == "chance":
            assert list(row[3:]) == list(position_scores(true, chance_positions(true, 0)).values())


def test_scores_of_expression_and_clusters_are_added(tissue):
    adata = with_expression(tissue)
    plain = evaluate(adata, baselines=True, cell_type_key="cell_type")
    options = {"expression_layer": "predicted", "cluster_key": "leiden", "cell_type_key": "cell_type"}
    table = evaluate(adata, baselines=True, **options)
    pd.testing.assert_frame_equal(table[plain.columns], plain)
    alone = tl.expression_scores(adata, "predicted", baselines=True, cell_type_key="cell_type", copy=True)
    columns = [name for name in alone.columns if name != "n_cells"]
    np.testing.assert_allclose(table[columns].to_numpy(), alone[columns].to_numpy(), rtol=1e-12)
    clusters = tl.cluster_scores(adata, "leiden", baselines=True, copy=True).drop(columns=["n_cells", "n_skipped"])
    np.testing.assert_allclose(table.loc[clusters.index, clusters.columns], clusters, rtol=1e-12)
    assert list(table.columns) == [*plain.columns, *columns, "moran_correlation", *clusters.columns]
    expression_only = evaluate(adata, prediction=None, expression_layer="predicted")
    assert list(expression_only.columns) == ["n_cells", "n_skipped", *columns, "moran_correlation"]


def moran_of(adata: AnnData, name: str, **keys) -> np.ndarray:
    return tl.morans_i(adata, copy=True, **keys).loc[name, "I"].to_numpy()


def test_morans_i_of_the_prediction(tissue):
    adata = with_expression(tissue)
    truth = moran_of(adata, "slice_1")
    # The layer is brought to the depth of the truth, which morans_i does not have.
    pair = read_pair(adata, "predicted", layer=None, prediction_layer=None, transform="auto")
    cells = np.flatnonzero(adata.obs["slice_id"] == "slice_1")
    scaled = pair.scaled(cells)[1]
    cases = [
        ({"autocorrelation": True}, moran_of(adata, "slice_1", spatial_key="spatial_reconstructed")),
        ({"prediction": None, "expression_layer": "predicted"}, morans_i(scaled, adata.obsm["spatial"][cells])),
        ({"expression_layer": "predicted"}, morans_i(scaled, adata.obsm["spatial_reconstructed"][cells])),
    ]
    values = []
    for options, predicted in cases:
        table = evaluate(adata, **options)
        values.append(table.loc["slice_1", "moran_correlation"])
        assert values[-1] == pytest.approx(np.corrcoef(truth, predicted)[0, 1], abs=1e-9)
    assert len(set(values)) == 3
    chance = evaluate(adata, autocorrelation=True, baselines=True)["moran_correlation"].xs("chance", level="positions")
    assert (chance < evaluate(adata, autocorrelation=True)["moran_correlation"]).all()


def test_modality_agreement_with_a_reference(tissue):
    tissue = with_expression(tissue)
    adata, real = (tissue[tissue.obs["slice_id"].isin(names)].copy() for names in (["slice_0"], ["slice_1", "slice_2"]))
    table = evaluate(adata, reference=real, baselines=True)["modality_agreement"].xs("slice_0")
    for key, kind in (("spatial_reconstructed", "prediction"), ("spatial", "chance")):
        scored = adata.copy()
        scored.obsm["spatial"] = adata.obsm[key][chance_order(120, 0)] if kind == "chance" else adata.obsm[key]
        expected = tl.modality_agreement(scored, real, copy=True)["modality_agreement"].item()
        assert table[kind] == pytest.approx(expected, abs=1e-9)
    joint = evaluate(adata, prediction=None, reference=real)
    assert list(joint.columns) == ["n_cells", "n_skipped", "modality_agreement"]
    expected = tl.modality_agreement(adata, real, copy=True)["modality_agreement"].item()
    assert joint.loc["slice_0", "modality_agreement"] == pytest.approx(expected, abs=1e-9)


def test_all_scores_use_the_scored_cells(tissue):
    adata = with_expression(tissue)
    adata.obsm["spatial"][:20] = np.nan
    adata.obs["spatial_reconstructed_placed"] = np.arange(360) % 10 > 0
    adata.obs.loc[adata.obs_names[30:35], "leiden"] = np.nan
    options = {"expression_layer": "predicted", "cluster_key": "leiden"}
    kept = (np.arange(360) >= 20) & (np.arange(360) % 10 > 0)
    expected = evaluate(adata[kept].copy(), **options)
    found = evaluate(adata, **options)
    same = [name for name in found.columns if name not in ("n_skipped", "aligned_rmsd", "rigid_rmsd")]
    pd.testing.assert_frame_equal(found[same], expected[same])


def test_max_cells_applies_to_all_scores(tissue):
    adata = with_expression(tissue)
    table = evaluate(adata, expression_layer="predicted", cluster_key="leiden", max_cells=50)
    cells = np.flatnonzero(adata.obs["slice_id"] == "slice_0")
    chosen = cells[subsample_cells(120, 50)]
    labels, clusters = (adata.obs[key].to_numpy(dtype=object)[chosen] for key in ("cell_type", "leiden"))
    assert table.loc["slice_0", "adjusted_rand"] == pytest.approx(cluster_scores(labels, clusters)["adjusted_rand"])
    everything = evaluate(adata, expression_layer="predicted")
    assert (table["pearson_gene"] != everything["pearson_gene"]).all()


def test_nothing_to_score_raises(tissue):
    with pytest.raises(ValueError, match="prediction=.*expression_layer="):
        evaluate(tissue, prediction=None)
    with pytest.raises(KeyError, match=r'layers\["x"\]'):
        evaluate(tissue, prediction=None, expression_layer="x")


def test_niches_of_the_scored_cells_with_baselines(tissue):
    adata = with_expression(tissue)
    types = adata.obs["cell_type"].astype(object)
    types.iloc[:9] = np.nan
    adata.obs["cell_type"] = types
    adata.obsm["spatial"][10:15] = np.nan
    options = {"baselines": True, "cell_type_key": "cell_type", "n_neighbors": 8, "random_state": 1}
    plain = evaluate(adata, **options)
    table = evaluate(adata, niches=True, n_niches=5, **options)
    pd.testing.assert_frame_equal(table[plain.columns], plain)
    assert list(table.columns) == [*plain.columns, *NICHES]
    cells = np.flatnonzero((adata.obs["slice_id"] == "slice_0") & ~np.isnan(adata.obsm["spatial"]).any(axis=1))
    true, types = adata.obsm["spatial"][cells], types.to_numpy()[cells]
    known = ~pd.isna(types)
    assert 0 < known.sum() < len(cells)
    for kind, positions in (
        ("prediction", adata.obsm["spatial_reconstructed"][cells]),
        ("chance", chance_positions(true, 1)),
        ("oracle", oracle_positions(true, types, 1)),
    ):
        arguments = true[known], positions[known], types[known]
        expected = niche_scores(*arguments, n_neighbors=8, n_niches=5, random_state=1)
        assert table.loc[("slice_0", kind), NICHES].to_dict() == pytest.approx(expected)
    means = table.groupby(level="positions")["label_agreement"].mean()
    assert means["chance"] < means["oracle"] < means["prediction"]


def test_max_cells_and_the_default_of_cell_types_apply_to_niches(tissue):
    adata = with_expression(tissue)
    with pytest.raises(ValueError, match="cell_type_key="):
        evaluate(adata, niches=True)
    adata.uns["spatial_reconstructed"] = {"params": {"cell_type_key": "cell_type"}}
    table = evaluate(adata, niches=True, max_cells=50)
    chosen = np.flatnonzero(adata.obs["slice_id"] == "slice_0")[subsample_cells(120, 50)]
    pair = adata.obsm["spatial"][chosen], adata.obsm["spatial_reconstructed"][chosen]
    expected = niche_scores(*pair, adata.obs["cell_type"].to_numpy(dtype=object)[chosen])
    assert table.loc["slice_0", NICHES].to_dict() == pytest.approx(expected)
