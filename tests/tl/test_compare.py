"""``tl.compare``: tables, the results file, held-out cells, errors."""

from __future__ import annotations

import json
from functools import wraps
from typing import TYPE_CHECKING, Any

import anndata as ad
import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
from scipy.stats import ortho_group
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from alphastomics import tl
from alphastomics.datasets import synthetic_tissue
from alphastomics.metrics import expression_scores, log1p_normalized, median_library_size
from alphastomics.model import AlphaSTomics
from alphastomics.tl import Configuration
from alphastomics.tl._compare_results import CURVE, make_tables
from alphastomics.tl._compare_runs import PREDICTED, Scoring, sample_expression
from alphastomics.tl._compare_splits import Split

if TYPE_CHECKING:
    from pathlib import Path

TINY: dict[str, Any] = {
    "d_model": 16,
    "n_layers": 1,
    "n_heads": 2,
    "context_size": 64,
    "batch_size": 128,
    "accelerator": "cpu",
    "precision": "32-true",
    "enable_progress_bar": False,
    "n_samples": 2,
    "n_steps": 2,
    "max_cells": 40,
    "cell_type_key": "cell_type",
}
SHORT = TINY | {"max_steps": 4}
PLACING = SHORT | {"mode": "expr_to_pos"}
CHOSEN = ["linear", "gated_moe"]


@pytest.fixture(scope="module")
def _cells() -> ad.AnnData:
    return synthetic_tissue(n_slices=3, n_cells=80, n_genes=20, random_state=0)


@pytest.fixture
def cells(_cells) -> ad.AnnData:
    return _cells.copy()


@pytest.fixture(scope="module")
def _compared(_cells, tmp_path_factory) -> tuple[ad.AnnData, pd.DataFrame, Path]:
    adata, path = _cells.copy(), tmp_path_factory.mktemp("compared") / "runs.json"
    table = tl.compare(adata, configurations=CHOSEN, seeds=[0, 1], results=path, **SHORT)
    return adata, table, path


@pytest.fixture
def compared(_compared, tmp_path) -> tuple[ad.AnnData, pd.DataFrame, Path]:
    """Cells, table and file of a comparison; the test may change them."""
    adata, table, path = _compared
    copy = tmp_path / "runs.json"
    copy.write_bytes(path.read_bytes())
    return adata.copy(), table.copy(), copy


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    """Attentions of the models that were trained during the test."""
    seen, train = [], AlphaSTomics.train

    @wraps(train)  # its signature is read
    def counted(self, *args, **kwargs):
        seen.append(self.module.config.attention)
        train(self, *args, **kwargs)

    monkeypatch.setattr(AlphaSTomics, "train", counted)
    return seen


def runs_in(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["runs"]


# -- tables ----------------------------------------------------------------------------------------------------------


def test_the_table_is_mean_and_deviation_of_the_runs(compared):
    adata, table, path = compared
    assert table.index.tolist() == ["linear", "gated_moe", "chance", "oracle"]
    assert table["n_seeds"].tolist() == [2] * 4
    assert table["n_failed"].tolist() == [0] * 4
    for name in CHOSEN:
        runs = [run for run in runs_in(path) if run["configuration"] == name]
        assert [run["seed"] for run in runs] == [0, 1]
        for score, value in runs[0]["scores"]["slice_2"].items():
            values = [run["scores"]["slice_2"][score] for run in runs]
            if score in ("n_cells", "n_skipped", "n_genes"):
                assert score not in table
                continue
            assert isinstance(value, float)
            assert table.loc[name, score] == pytest.approx(np.mean(values))
            assert table.loc[name, f"{score}_sd"] == pytest.approx(np.std(values, ddof=1))
        for measure in ("train_loss", "validation_loss", "step_seconds", "step_processor_seconds", "n_steps"):
            assert table.loc[name, measure] == pytest.approx(np.mean([run[measure] for run in runs]))
    expected = {"distance_spearman", "knn_preservation", "pearson_gene", "moran_correlation", "validation_loss_sd"}
    expected |= {"adjusted_rand", "normalized_mutual_information", "modality_agreement"}
    expected |= {"expression_mse", "distance_matrix_mse", "train_seconds"}
    assert expected < set(table)
    assert np.isfinite(table.loc[CHOSEN].astype(float).to_numpy()).all()
    pd.testing.assert_frame_equal(adata.uns["comparison"]["summary"], table)


def test_parameters_match_the_model(compared, cells):
    _, table, _ = compared
    AlphaSTomics.setup_anndata(cells)
    model = AlphaSTomics(cells, d_model=16, n_layers=1, n_heads=2, use_moe=True)
    total = sum(parameter.numel() for parameter in model.module.parameters())
    experts = sum(getattr(model.module.blocks[0].ffn, n).numel() for n in ("weight_1", "bias_1", "weight_2", "bias_2"))
    row = table.loc["gated_moe"]
    assert (row["parameters"], row["active_parameters"], row["d_model"]) == (total, total - experts // 2, 16)
    assert table.loc["linear", "parameters"] == table.loc["linear", "active_parameters"]
    assert table.loc[["chance", "oracle"], "parameters"].isna().all()


def test_curves_end_where_the_runs_end(compared):
    adata, _, path = compared
    curves = adata.uns["comparison"]["curves"]
    assert list(curves) == ["configuration", "seed", "step", "seconds", "train_loss", "validation_loss"]
    for run in runs_in(path):
        curve = curves[(curves["configuration"] == run["configuration"]) & (curves["seed"] == run["seed"])]
        assert curve["step"].is_monotonic_increasing
        assert len(curve) == 2
        last = curve.iloc[-1]
        assert (last["step"], last["validation_loss"]) == (4, run["validation_loss"])


def test_a_run_equals_the_same_steps_by_hand(compared, cells):
    _, _, path = compared
    is_query = (cells.obs["slice_id"] == "slice_2").to_numpy()
    query, reference = cells[is_query].copy(), cells[~is_query].copy()
    AlphaSTomics.setup_anndata(reference)
    model = AlphaSTomics(reference, attention="linear", d_model=16, n_layers=1, n_heads=2, random_state=1)
    training = {name: SHORT[name] for name in ("context_size", "batch_size", "accelerator", "precision", "max_steps")}
    model.train(max_epochs=-1, devices=1, enable_progress_bar=False, **training)
    tl.reconstruct(query, model=model, random_state=1)
    expected = tl.evaluate(query).loc["slice_2"].to_dict()
    (run,) = [run for run in runs_in(path) if (run["configuration"], run["seed"]) == ("linear", 1)]
    scores = run["scores"]["slice_2"]
    assert {name: scores[name] for name in expected if name != "n_cells"} == pytest.approx(
        {name: value for name, value in expected.items() if name != "n_cells"}
    )
    some = sample_expression(
        model, query, Scoring(expression=True, n_samples=2, n_steps=2, max_cells=40, cell_type_key=None), seed=1
    )
    size = median_library_size(some.X)
    both = [log1p_normalized(x, size) for x in (some.X, some.layers[PREDICTED])]
    assert some.n_obs == 40
    for name, value in expression_scores(*both).items():
        assert scores[name] == pytest.approx(value, abs=1e-6)
    labels = query.obs["cell_type"].astype(str)
    means = KMeans(labels.nunique(), n_init=10, random_state=1).fit(model.get_latent_representation(query))
    assert scores["adjusted_rand"] == pytest.approx(adjusted_rand_score(labels, means.labels_))
    drawn = model.sample(mode="joint", n_cells=40, n_steps=2, random_state=1)
    agreement = tl.modality_agreement(drawn, query, copy=True, random_state=1)["modality_agreement"]
    assert scores["modality_agreement"] == pytest.approx(agreement.mean())


def test_baselines_match_evaluate(compared, cells):
    _, table, _ = compared
    query = cells[cells.obs["slice_id"] == "slice_2"].copy()
    query.obsm["same"] = query.obsm["spatial"]
    found = [
        tl.evaluate(query, prediction="same", baselines=True, cell_type_key="cell_type", random_state=seed)
        for seed in (0, 1)
    ]
    for kind in ("chance", "oracle"):
        values = [each.loc[("slice_2", kind), "distance_spearman"] for each in found]
        assert table.loc[kind, "distance_spearman"] == pytest.approx(np.mean(values))
        assert table.loc[kind, "distance_spearman_sd"] == pytest.approx(np.std(values, ddof=1))


def test_tables_survive_a_file(compared, tmp_path):
    adata, table, _ = compared
    adata.write_h5ad(tmp_path / "cells.h5ad")
    read = ad.read_h5ad(tmp_path / "cells.h5ad").uns["comparison"]
    pd.testing.assert_frame_equal(read["summary"], table, check_dtype=False, check_index_type=False)
    assert list(read["runs"]) == list(adata.uns["comparison"]["runs"])


def test_registered_cells_remain_registered(cells):
    AlphaSTomics.setup_anndata(cells)
    before = dict(cells.uns)
    tl.compare(cells, configurations=["linear"], seeds=[0], **(PLACING | {"max_steps": 1}))
    tl.compare(cells, cells[:80], configurations=["linear"], seeds=[0], **(PLACING | {"max_steps": 1}))
    assert AlphaSTomics(cells, d_model=16, n_layers=1, n_heads=2).schema.slices == ("slice_0", "slice_1", "slice_2")
    assert {name: cells.uns[name] for name in before} == before


def test_only_uns_is_changed(compared, cells):
    adata, _, _ = compared
    assert list(adata.uns) == [*cells.uns, "comparison"]
    pd.testing.assert_frame_equal(adata.obs, cells.obs)
    assert list(adata.obsm) == list(cells.obsm)
    np.testing.assert_array_equal(adata.X.toarray(), cells.X.toarray())


# -- the results file ------------------------------------------------------------------------------------------------


def test_finished_runs_are_not_repeated(compared, cells, trained):
    _, table, path = compared
    before = path.read_bytes()
    again = tl.compare(cells, configurations=CHOSEN, seeds=[0, 1], results=path, **SHORT)
    assert trained == []
    assert path.read_bytes() == before
    pd.testing.assert_frame_equal(again, table)


def test_only_new_runs_are_trained(cells, trained, tmp_path):
    path = tmp_path / "runs.json"
    options = PLACING | {"configurations": ["linear"], "results": path}
    tl.compare(cells, seeds=[0, 1], **options)
    table = tl.compare(cells, seeds=[1, 2], **options)
    assert len(trained) == len(runs_in(path)) == 3
    assert table["n_seeds"].tolist() == [2] * 3
    tl.compare(cells, seeds=[1], **(options | {"max_steps": 2}))
    tl.compare(cells, seeds=[1], plan_kwargs={"lr": 1e-4}, **options)
    cells.X[0, 0] += 1
    tl.compare(cells, seeds=[1], **options)
    assert len(trained) == len(runs_in(path)) == 6


class Interrupt(pl.Callback):
    """Interrupts the training of models with full attention."""

    def on_train_batch_end(self, trainer, plan, *_):
        if plan.module.config.attention == "full":
            raise KeyboardInterrupt


def test_an_interrupted_run_is_not_kept(cells, tmp_path):
    path = tmp_path / "new" / "runs.json"
    with pytest.raises(KeyboardInterrupt):
        tl.compare(cells, configurations=CHOSEN, seeds=[0], results=path, callbacks=[Interrupt()], **PLACING)
    assert [run["configuration"] for run in runs_in(path)] == ["linear"]
    assert list(path.parent.iterdir()) == [path]
    assert "comparison" not in cells.uns


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "truncated.*results="),
        (lambda text: "", "truncated.*results="),
        (lambda text: "[]", "not the file.*results="),
        (lambda text: text.replace('"format_version": 1', '"format_version": 9'), "version 9.*results="),
    ],
    ids=["half", "empty", "other", "newer"],
)
def test_an_invalid_results_file_raises_and_is_kept(compared, cells, trained, change, message):
    _, _, path = compared
    path.write_text(change(path.read_text()))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=message):
        tl.compare(cells, configurations=CHOSEN, seeds=[0, 1], results=path, **SHORT)
    assert path.read_bytes() == before
    assert trained == []


def test_a_run_that_diverges_is_recorded_and_not_repeated(cells, tmp_path, trained):
    path = tmp_path / "runs.json"
    chosen = {
        "good": Configuration(),
        "far": Configuration(plan={"lr": 1e30, "warmup_steps": 0}),
        "broken": Configuration(plan={"lambda_position": 1e300}),
    }
    options = PLACING | {"seeds": [0], "results": path}
    table = tl.compare(cells, configurations=chosen, **options)
    assert table["n_failed"].tolist() == [0, 1, 1, 0, 0]
    assert table["distance_spearman"].isna().tolist() == [False, True, True, False, False]
    assert "pearson_gene" not in table
    assert "at step 0" in runs_in(path)[2]["failure"]
    again = tl.compare(cells, configurations=chosen, **options)
    assert len(trained) == 3
    pd.testing.assert_frame_equal(again, table)


# -- held-out cells -------------------------------------------------------------------------------------------------


def test_a_small_held_out_slice_has_no_agreement(cells):
    """Twenty cells are too few for the regression that scores joint samples."""
    small = cells[(cells.obs["slice_id"] != "slice_2") | (np.arange(cells.n_obs) >= cells.n_obs - 20)].copy()
    table = tl.compare(small, configurations=["linear"], seeds=[0], held_out="slice_2", **SHORT)
    assert np.isfinite(table.loc["linear", "distance_spearman"])
    assert "modality_agreement" not in table


def test_labels_are_part_of_a_split(cells):
    """Finished runs are not taken for those of other cell types, which may be an input."""
    AlphaSTomics.setup_anndata(cells, cell_type_key="cell_type")
    schema = AlphaSTomics(cells, d_model=16, n_layers=1, n_heads=2).schema
    other = cells.copy()
    other.obs["cell_type"] = other.obs["cell_type"].to_numpy()[::-1]
    first, second = (Split(reference=each, query=cells, held_out=(), schema=schema).hash() for each in (cells, other))
    assert first != second


def test_runs_without_a_finished_epoch_have_no_curve(compared):
    runs = [run | {"curve": {name: [] for name in CURVE}} for run in runs_in(compared[2])]
    tables = make_tables(runs)
    assert not len(tables["curves"])
    assert list(tables["curves"]) == ["configuration", "seed", *CURVE]


def test_held_out_slices_by_seed(cells, tmp_path):
    path = tmp_path / "runs.json"
    tl.compare(
        cells, configurations=["linear"], seeds=[0, 1], held_out={0: "slice_0", 1: ["slice_2", "slice_1"]},
        results=path, **PLACING,
    )  # fmt: skip
    assert [list(run["scores"]) for run in runs_in(path)] == [["slice_0"], ["slice_1", "slice_2"]]
    runs = cells.uns["comparison"]["runs"]
    assert runs["held_out"].tolist()[:2] == ["slice_0", "slice_1, slice_2"]
    two = pd.DataFrame(runs_in(path)[1]["scores"]).mean(axis=1)
    assert runs.loc[1, "aligned_rmsd"] == pytest.approx(two["aligned_rmsd"])


def test_held_out_cells_do_not_influence_training(cells):
    options = PLACING | {"configurations": ["linear"], "seeds": [0]}
    tl.compare(cells, **options)
    held_out = np.flatnonzero(cells.obs["slice_id"] == "slice_2")
    other = cells.copy()
    other.X = other.X.toarray()
    other.X[held_out] = other.X[held_out][::-1]
    other.obsm["spatial"][held_out] *= 3
    tl.compare(other, **options)
    one, two = (each.uns["comparison"]["curves"] for each in (cells, other))
    assert one["train_loss"].tolist() == pytest.approx(two["train_loss"].tolist(), rel=1e-6)
    assert abs(one["validation_loss"] - two["validation_loss"]).min() > 1e-3


def test_a_query_equals_a_held_out_slice(compared, cells):
    _, table, _ = compared
    is_query = (cells.obs["slice_id"] == "slice_2").to_numpy()
    other = tl.compare(
        cells[~is_query].copy(), cells[is_query].copy(), configurations=["linear"], seeds=[0, 1], **SHORT
    )
    scores = ["distance_spearman", "pearson_gene", "validation_loss"]
    assert other.loc["linear", scores].tolist() == pytest.approx(table.loc["linear", scores].tolist())


def test_cells_of_a_single_slice_are_held_out(cells, caplog):
    one = cells[cells.obs["slice_id"] == "slice_0"].copy()
    table = tl.compare(one, configurations=["linear"], seeds=[0], **PLACING)
    assert "20 %" in caplog.text
    assert np.isfinite(table.loc["linear", "distance_spearman"])


def test_the_frame_of_the_held_out_slice_does_not_matter(cells, compared):
    is_query = (cells.obs["slice_id"] == "slice_2").to_numpy()
    reference, query = cells[~is_query].copy(), cells[is_query].copy()
    turned = query.copy()
    turned.obsm["spatial"] = query.obsm["spatial"] @ ortho_group.rvs(2, random_state=0) + [50, -80]
    AlphaSTomics.setup_anndata(reference)
    model = AlphaSTomics(reference, d_model=16, n_layers=1, n_heads=2, random_state=0)
    training = {name: SHORT[name] for name in ("context_size", "batch_size", "accelerator", "precision", "max_steps")}
    model.train(max_epochs=-1, enable_progress_bar=False, **training)
    scoring = Scoring(expression=True, n_samples=2, n_steps=2, max_cells=1000, cell_type_key=None)
    layers = []
    for each in (query, turned):
        tl.reconstruct(each, model=model)
        layers.append(sample_expression(model, each, scoring, seed=0).layers[PREDICTED].toarray())
    np.testing.assert_allclose(*layers, rtol=1e-3, atol=1e-3)
    assert np.ptp(layers[0], axis=0).max() > 0.1


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"held_out": "slice_9"}, KeyError, "slice_9.*held_out="),
        ({"held_out": 9}, KeyError, "unknown slice '9'"),
        ({"held_out": ["slice_0", "slice_1", "slice_2"]}, ValueError, "held_out"),
        ({"held_out": {0: "slice_0"}}, KeyError, "held_out.*seed 1"),
        ({"seeds": []}, ValueError, "seeds"),
        ({"seeds": [1, 1]}, ValueError, "seeds"),
        ({"max_time": 5}, ValueError, "max_time"),
        ({"mode": "joint"}, ValueError, "mode='joint'"),
        ({"max_epochs": 3}, TypeError, "max_epochs"),
        ({"random_state": 3}, TypeError, "random_state"),
        ({"depth": 3}, TypeError, "depth"),
        ({"seed": 3}, TypeError, "'seed'; did you mean 'seeds'"),
        ({"configurations": {"a": Configuration(model={"depth": 3})}}, TypeError, "depth"),
        ({"configurations": {"a": Configuration(plan={"rate": 3})}}, TypeError, "rate"),
        ({"configurations": {"a": Configuration(model={"use_moe": True, "num_experts": 7})}}, ValueError, "split"),
        ({"position_key": "nowhere"}, KeyError, "nowhere"),
    ],
)
def test_invalid_arguments_raise_before_training(cells, trained, tmp_path, arguments, error, message):
    path = tmp_path / "runs.json"
    with pytest.raises(error, match=message):
        tl.compare(cells, **(SHORT | {"seeds": [0, 1], "results": path} | arguments))
    assert trained == []
    assert not path.exists()


def test_results_must_be_a_file(cells, tmp_path):
    with pytest.raises(IsADirectoryError, match="results="):
        tl.compare(cells, results=tmp_path, **SHORT)
    with pytest.raises(ValueError, match="held_out"):
        tl.compare(cells, cells, held_out="slice_0", **SHORT)
