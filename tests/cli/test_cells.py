"""What ``sample``, ``test`` and ``extract`` read and write: the same cells, whatever they come from and go to."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from alphastomics.cli._cells import panels, sample_cells
from alphastomics.cli._query import _check_positions, check_suffix
from alphastomics.cli._tensors import read_tensors
from alphastomics.data import read_dataset, read_parquet
from alphastomics.data.preprocess import Stage1Options, Stage2Options, preprocess
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main
from alphastomics.model import AlphaSTomics
from files import error_line, write_slices

STEPS = ["--n-steps", "2"]
PANEL = 4  # genes that one of the slices lacks


def run(*tokens):
    return main([str(token) for token in tokens])


def test_positions_may_be_a_data_frame():
    cells = synthetic_tissue(n_slices=1, n_cells=20, n_genes=5, random_state=0)
    expected = cells.obsm["spatial"].copy()
    table = pd.DataFrame(np.c_[expected, np.zeros(20)], index=cells.obs_names, columns=["x", "y", "z"])
    cells.obsm["spatial"] = table
    _check_positions(cells, Path("query.h5ad"), SimpleNamespace(position_key="spatial", n_dims=2, n_columns=2))
    np.testing.assert_array_equal(cells.obsm["spatial"], expected)


@pytest.fixture(scope="module")
def tissue():
    return synthetic_tissue(n_slices=4, n_cells=60, n_genes=20, random_state=0)


def make_dataset(tissue, folder, *, lacking=(), split="slice"):
    raw = write_slices(tissue, folder / "raw", lacking=lacking, n_genes=PANEL)
    options = Stage2Options(split=split, train_ratio=0.5, val_ratio=0.25)
    preprocess(raw, folder / "dataset", Stage1Options(cell_type_key="cell_type"), options)
    return folder / "dataset"


@pytest.fixture(scope="module")
def folder(tissue, tmp_path_factory):
    """A dataset whose test set is a slice, that slice as ``query.h5ad``, and a model with keys of its own."""
    folder = tmp_path_factory.mktemp("cells")
    dataset = make_dataset(tissue, folder)
    cells = read_dataset(dataset)
    cells.write_h5ad(folder / "query.h5ad")
    reference = tissue[~tissue.obs_names.isin(cells.obs_names)].copy()
    for name, keys in (("model", {}), ("named", {"position_key": "place", "slice_key": "section", "layer": "counts"})):
        if keys:
            reference.obsm["place"], reference.obs["section"] = reference.obsm["spatial"], reference.obs["slice_id"]
            reference.layers["counts"] = reference.X.copy()
            reference.X = reference.X * 0.5
        AlphaSTomics.setup_anndata(reference, cell_type_key="cell_type", **keys)
        model = AlphaSTomics(reference, d_model=16, n_layers=1, n_heads=2)
        model.train(max_epochs=2, context_size=64, accelerator="cpu", enable_progress_bar=False)
        model.save(folder / name)
    return folder


@pytest.fixture
def model(folder):
    return AlphaSTomics.load(folder / "model", adata=False, accelerator="cpu")


@pytest.fixture
def cells(folder):
    return ad.read_h5ad(folder / "query.h5ad")


@pytest.fixture
def model_flags(folder):
    return ["--checkpoint", folder / "model", "--accelerator", "cpu"]


def save_tensors(path, cells, **changes):
    tensors = {
        "expression": torch.from_numpy(cells.X.toarray()),
        "positions": torch.from_numpy(cells.obsm["spatial"]),
        "slice_id": torch.zeros(cells.n_obs, dtype=torch.int64),
    }
    tensors |= changes
    torch.save({name: value for name, value in tensors.items() if value is not None}, path)
    return path


# -- what is read ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["parquet", "dataset", "pt", "named by position"])
def given(request, folder, cells, tmp_path):
    """The cells of ``query.h5ad``, from elsewhere."""
    if request.param == "dataset":
        return ["--data-dir", folder / "dataset"]
    if request.param == "parquet":
        return ["--input-data", shutil.copy(folder / "dataset/data/test.parquet", tmp_path / "cells.parquet")]
    changes = {"positions": None, "position": torch.from_numpy(cells.obsm["spatial"])} if "by" in request.param else {}
    return ["--input_data", save_tensors(tmp_path / "input.pt", cells, **changes)]


def test_the_same_cells_have_the_same_places(given, folder, model_flags, model, cells, tmp_path):
    assert run("sample", *model_flags, *given, "--output", tmp_path / "out.h5ad") == 0
    placed = ad.read_h5ad(tmp_path / "out.h5ad")
    expected = model.sample(cells, mode="expr_to_pos").obsm["spatial_reconstructed"]
    np.testing.assert_array_equal(placed.obsm["spatial_reconstructed"], expected)
    np.testing.assert_array_equal(placed.X.toarray(), cells.X.toarray())


def test_the_same_cells_have_the_same_scores(given, folder, model_flags, tmp_path):
    assert run("test", *model_flags, *given, "--output", tmp_path / "a.json") == 0
    assert run("test", *model_flags, "--input-data", folder / "query.h5ad", "--output", tmp_path / "b.json") == 0
    (found,), (expected,) = (list(json.loads((tmp_path / name).read_text()).values()) for name in ("a.json", "b.json"))
    assert found["prediction"] == expected["prediction"]
    assert found["chance"] == expected["chance"]


def test_planar_cells_have_the_same_scores_with_and_without_their_constant_column(
    given, folder, cells, tissue, tmp_path
):
    reference = tissue[~tissue.obs_names.isin(cells.obs_names)].copy()
    reference.obsm["spatial"] = np.c_[reference.obsm["spatial"], np.full(reference.n_obs, 5.0)]
    AlphaSTomics.setup_anndata(reference)
    model = AlphaSTomics(reference, d_model=16, n_layers=1, n_heads=2)
    model.train(max_steps=1, context_size=64, accelerator="cpu", enable_progress_bar=False)
    model.save(tmp_path / "model")
    cells.obsm["spatial"] = np.c_[cells.obsm["spatial"], np.full(cells.n_obs, 9.0)]
    cells.write_h5ad(tmp_path / "raised.h5ad")
    flags, scores = ["--checkpoint", tmp_path / "model", "--accelerator", "cpu"], []
    for tokens in (given, ["--input-data", tmp_path / "raised.h5ad"]):
        assert run("test", *flags, *tokens, "--output", tmp_path / "scores.json") == 0
        scores += json.loads((tmp_path / "scores.json").read_text()).values()
    assert scores[0]["prediction"] == scores[1]["prediction"]
    assert run("sample", *flags, *given, "--output", tmp_path / "out.parquet") == 0
    assert (read_parquet(tmp_path / "out.parquet").obsm["spatial"][:, 2] == 5).all()


def test_the_same_cells_have_the_same_embedding(given, model_flags, model, cells, tmp_path):
    assert run("extract", *model_flags, *given, "--use-positions", "--output", tmp_path / "z.npz") == 0
    with np.load(tmp_path / "z.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["latent"], model.get_latent_representation(cells, use_positions=True))


def test_a_model_finds_them_under_its_own_keys(given, folder, cells, tmp_path):
    model_flags = ["--checkpoint", folder / "named", "--accelerator", "cpu"]
    model = AlphaSTomics.load(folder / "named", adata=False, accelerator="cpu")
    cells.obsm["place"], cells.obs["section"], cells.layers["counts"] = cells.obsm["spatial"], "a", cells.X.copy()
    expected = model.sample(cells, mode="expr_to_pos")
    assert run("sample", *model_flags, *given, "--output", tmp_path / "out.h5ad") == 0
    placed = ad.read_h5ad(tmp_path / "out.h5ad")
    np.testing.assert_array_equal(placed.obsm["place"], expected.obsm["place"])
    assert "section" in placed.obs
    assert run("test", *model_flags, *given) == 0
    # From an AnnData whose X is something else, Parquet takes what the model reads.
    cells.X = cells.X * 0.5
    cells.write_h5ad(tmp_path / "layered.h5ad")
    tokens = ["--input-data", tmp_path / "layered.h5ad", "--output", tmp_path / "out.parquet"]
    assert run("sample", *model_flags, *tokens) == 0
    np.testing.assert_array_equal(read_parquet(tmp_path / "out.parquet").X.toarray(), cells.layers["counts"].toarray())


def test_any_split_is_read(folder, model_flags, tissue, tmp_path):
    for split in ("train", "validation"):
        tokens = ["--data_dir", folder / "dataset", "--split", split, "--output", tmp_path / "z.parquet"]
        assert run("extract", *model_flags, *tokens) == 0
        names = pq.read_table(tmp_path / "z.parquet").column("cell_id").to_pylist()
        assert names == read_dataset(folder / "dataset", split).obs_names.tolist()


def test_a_model_in_the_plane_reads_x_and_y(folder, model_flags, cells, tmp_path):
    deep = np.column_stack([cells.obsm["spatial"], np.full(cells.n_obs, 7.0)])
    path = save_tensors(tmp_path / "deep.pt", cells, positions=torch.from_numpy(deep))
    assert run("extract", *model_flags, "--input-data", path, "--use-positions", "--output", tmp_path / "a.npz") == 0
    tokens = ["--input-data", folder / "query.h5ad", "--use-positions", "--output", tmp_path / "b.npz"]
    assert run("extract", *model_flags, *tokens) == 0
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        np.testing.assert_array_equal(a["latent"], b["latent"])


# -- a file without slices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".pt", ".h5ad"])
def test_a_file_without_slice_ids_is_one_slice(suffix, model_flags, model, cells, tmp_path, caplog):
    path = tmp_path / f"s1{suffix}"
    if suffix == ".pt":
        save_tensors(path, cells, slice_id=None)
    else:
        bare = cells.copy()
        del bare.obs["slice_id"]
        bare.write_h5ad(path)
    caplog.set_level("INFO", logger="alphastomics")
    tokens = ["--input-data", path, "--sample-mode", "pos_to_expr", *STEPS, "--output", tmp_path / "out.h5ad"]
    assert run("sample", *model_flags, *tokens) == 0
    written = ad.read_h5ad(tmp_path / "out.h5ad")
    assert written.obs["slice_id"].unique().tolist() == ["s1"]
    cells.obs["slice_id"] = "s1"
    expected = model.sample(cells, mode="pos_to_expr", n_steps=2)
    np.testing.assert_array_equal(written.X.toarray(), expected.X.toarray())
    assert run("extract", *model_flags, "--input-data", path, "--use-positions", "--output", tmp_path / "z.npz") == 0
    with np.load(tmp_path / "z.npz") as arrays:
        np.testing.assert_array_equal(arrays["latent"], model.get_latent_representation(cells, use_positions=True))
    assert run("test", *model_flags, "--input-data", path, "--output", tmp_path / "scores.json") == 0
    assert list(json.loads((tmp_path / "scores.json").read_text())) == ["s1"]
    told = [record.getMessage() for record in caplog.records if "one slice" in record.getMessage()]
    assert len(told) == 3
    assert all(f"{path} " in message and 'obs["slice_id"]' in message and "'s1'" in message for message in told)


# -- new slices like those of an input ----------------------------------------------------------------------------------------


def test_the_command_of_the_earlier_version_draws_as_many_cells(
    model_flags, model, cells, tmp_path, caplog, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    save_tensors("input.pt", cells, expression=torch.zeros(cells.n_obs, 20), positions=None)
    caplog.set_level("INFO", logger="alphastomics")
    line_of_old = ["sample", *model_flags, "--input_data", "input.pt", "--sample_mode", "joint", *STEPS]
    assert run(*line_of_old) == 0
    drawn, expected = ad.read_h5ad("sampled.h5ad"), model.sample(mode="joint", n_cells=cells.n_obs, n_steps=2)
    np.testing.assert_array_equal(drawn.obsm["spatial"], expected.obsm["spatial"])
    told = [record.getMessage() for record in caplog.records]
    assert any(re.search(rf"input\.pt.* {cells.n_obs} .*1 slice", message) for message in told)
    assert any(re.search(rf"{cells.n_obs} cells.*sampled\.h5ad", message) for message in told)
    capsys.readouterr()
    assert run(*line_of_old) == 1
    assert re.search(r"sampled\.h5ad.*--output", error_line(capsys))


def test_every_slice_of_an_input_has_one_of_its_size(model_flags, cells, tmp_path):
    slices = torch.cat([torch.full((20,), 7), torch.full((cells.n_obs - 20,), 3)])
    path = save_tensors(tmp_path / "input.pt", cells, slice_id=slices)
    tokens = ["--input-data", path, "--sample-mode", "joint", "--n-samples", "2", *STEPS]
    assert run("sample", *model_flags, *tokens, "--output", tmp_path / "out.h5ad") == 0
    drawn = ad.read_h5ad(tmp_path / "out.h5ad")
    large = cells.n_obs - 20
    assert drawn.obs["slice_id"].value_counts().to_dict() == {
        "sample_0": large, "sample_1": large, "sample_2": 20, "sample_3": 20,
    }  # fmt: skip
    assert drawn.obs_names.is_unique
    told = drawn.uns["alphastomics"]
    assert (told["params"]["n_cells"], told["params"]["random_state"]) == (str([large, 20]), 0)
    assert told["function"] == "sample"
    places = [drawn[drawn.obs["slice_id"] == f"sample_{k}"].obsm["spatial"][0, 0] for k in range(4)]
    assert len(set(places)) == 4


# -- genes that some slices lack --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven(tissue, tmp_path_factory):
    """A dataset of which slices 1 and 2 lack genes, all slices in every split."""
    return make_dataset(tissue, tmp_path_factory.mktemp("uneven"), lacking=("slice_1", "slice_2"), split="cell")


def test_a_file_of_uneven_slices_is_not_trained_on(uneven, capsys):
    assert run("train", "--input-data", uneven / "data/train.parquet") == 1
    assert re.search(r"train\.parquet.*genes.*--data-dir", error_line(capsys))


def alone(tissue, name, uneven):
    """The cells of a slice in the test set, with the genes that it measures."""
    names = [cell for cell in read_dataset(uneven).obs_names if tissue.obs.loc[cell, "slice_id"] == name]
    part = tissue[names, PANEL:] if name in ("slice_1", "slice_2") else tissue[names]
    return part.copy()


def test_slices_are_grouped_by_their_measured_genes(uneven, tissue):
    cells = read_dataset(uneven)
    divided = panels(cells, None)
    assert sorted(np.concatenate([rows for rows, _ in divided])) == list(range(cells.n_obs))
    for rows, part in divided:
        assert part.obs_names.tolist() == cells.obs_names[rows].tolist()
        lacks = set(part.obs["slice_id"]) <= {"slice_1", "slice_2"}
        assert part.var_names.tolist() == tissue.var_names[PANEL * lacks :].tolist()
    assert len(divided) == 2
    assert len(panels(cells, "section")) == 1  # their slices are unknown
    assert len(panels(cells[cells.obs["slice_id"] == "slice_1"].copy(), None)) == 1


@pytest.mark.filterwarnings("ignore:4 of 20 genes are missing")
def test_a_slice_is_placed_by_the_genes_that_it_measures(uneven, tissue, model_flags, model, tmp_path):
    tokens = ["--data-dir", uneven, "--n-samples", "2"]
    assert run("sample", *model_flags, *tokens, "--output", tmp_path / "out.h5ad") == 0
    placed = ad.read_h5ad(tmp_path / "out.h5ad")
    order = read_dataset(uneven).obs_names
    assert placed.obs_names.tolist() == [f"{name}-{k}" for k in (0, 1) for name in order]
    assert placed.obs["draw"].tolist() == [k for k in (0, 1) for _ in order]
    assert placed.obs["slice_id"].dtype == "category"
    for name in ("slice_0", "slice_1"):
        part = alone(tissue, name, uneven)
        expected = model.sample(part, mode="expr_to_pos", n_samples=2)
        assert placed.uns["spatial_reconstructed"] == expected.uns["spatial_reconstructed"]
        found = placed[expected.obs_names]
        np.testing.assert_array_equal(found.obsm["spatial_reconstructed"], expected.obsm["spatial_reconstructed"])
        np.testing.assert_array_equal(found[:, expected.var_names].X.toarray(), expected.X.toarray())
    assert placed.varm["measured_in"]["slice_1"].tolist() == [False] * PANEL + [True] * (20 - PANEL)


@pytest.mark.filterwarnings("ignore:4 of 20 genes are missing")
def test_a_slice_is_embedded_and_scored_by_the_genes_that_it_measures(uneven, tissue, model_flags, model, tmp_path):
    assert run("extract", *model_flags, "--data-dir", uneven, "--output", tmp_path / "z.h5ad") == 0
    latent = ad.read_h5ad(tmp_path / "z.h5ad")
    assert run("test", *model_flags, "--data-dir", uneven, "--output", tmp_path / "all.json") == 0
    scores = json.loads((tmp_path / "all.json").read_text())
    assert list(scores) == ["slice_0", "slice_1", "slice_2", "slice_3"]
    for name in ("slice_1", "slice_3"):
        part = alone(tissue, name, uneven)
        found = latent[part.obs_names].obsm["X_alphastomics"]
        np.testing.assert_array_equal(found, model.get_latent_representation(part))
        part.write_h5ad(tmp_path / "part.h5ad")
        assert run("test", *model_flags, "--input-data", tmp_path / "part.h5ad", "--output", tmp_path / "one.json") == 0
        assert json.loads((tmp_path / "one.json").read_text())[name]["prediction"] == scores[name]["prediction"]


def test_unmeasured_genes_are_not_read_as_zeros(uneven, model):
    cells = read_dataset(uneven)
    with pytest.raises(ValueError, match=r'2 slices.*varm\["measured_in"\]'):
        model.sample(cells)
    with pytest.raises(ValueError, match="2 slices"):
        AlphaSTomics.setup_anndata(cells)
    rows = cells.obs["slice_id"] == "slice_1"
    part = cells[rows, cells.varm["measured_in"]["slice_1"]]
    with pytest.warns(UserWarning, match="4 of 20 genes"):
        assert model.sample(part).n_obs == rows.sum()


@pytest.mark.filterwarnings("ignore:[15] of 20 genes are missing")
def test_genes_that_only_removed_slices_measure_are_left_out(uneven, model):
    cells = read_dataset(uneven)
    only = cells.var_names[-1]
    cells.varm["measured_in"].loc[only] = cells.varm["measured_in"].columns == "slice_3"
    cells = cells[cells.obs["slice_id"] != "slice_3"].copy()
    placed = sample_cells(model, cells, mode="expr_to_pos", inpaint=False)
    assert placed.var_names.tolist() == cells.var_names[:-1].tolist()
    assert placed.varm["measured_in"].equals(cells.varm["measured_in"].iloc[:-1])
    np.testing.assert_array_equal(placed.X.toarray(), cells[:, :-1].X.toarray())


@pytest.mark.filterwarnings("ignore:4 of 20 genes are missing", "ignore:2 of .* cells")
def test_tied_cells_of_one_panel_leave_no_missing_values(uneven, model):
    cells = read_dataset(uneven)
    rows = np.flatnonzero(cells.obs["slice_id"] == "slice_1")[:2]
    x = cells.X.toarray()
    x[rows[1]] = x[rows[0]]
    cells.X = x
    placed = sample_cells(model, cells, mode="expr_to_pos", inpaint=False)
    tied = placed.obs["spatial_reconstructed_tied"]
    assert tied.dtype == bool
    assert set(np.flatnonzero(tied)) == set(rows)


def test_sampling_without_genes_ignores_measured_genes(uneven, model):
    cells = read_dataset(uneven)
    options = {"mode": "pos_to_expr", "n_steps": 1, "n_samples": 3, "reduce": "medoid", "inpaint": False}
    found, expected = sample_cells(model, cells, **options), model.sample(cells, **options)
    np.testing.assert_array_equal(found.X.toarray(), expected.X.toarray())


# -- what is written --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        ["--n-samples", "2"],
        ["--n-samples", "2", "--reduce", "mean"],
        ["--sample-mode", "pos_to_expr", *STEPS],
        ["--sample-mode", "pos_to_expr", *STEPS, "--n-samples", "2", "--reduce", "mean"],
    ],
)
def test_parquet_and_h5ad_hold_the_same_cells(folder, model_flags, tokens, tmp_path):
    tokens = ["sample", *model_flags, "--input-data", folder / "query.h5ad", *tokens, "--output"]
    assert run(*tokens, tmp_path / "out.h5ad") == run(*tokens, tmp_path / "out.parquet") == 0
    expected, found = ad.read_h5ad(tmp_path / "out.h5ad"), read_parquet(tmp_path / "out.parquet")
    assert sorted(found.obs_names) == sorted(expected.obs_names)
    expected = expected[found.obs_names]
    np.testing.assert_array_equal(found.X.toarray(), expected.X.toarray())
    key = "spatial" if "pos_to_expr" in tokens else "spatial_reconstructed"
    np.testing.assert_array_equal(found.obsm["spatial"], expected.obsm[key])
    columns = pq.read_table(tmp_path / "out.parquet").to_pandas()
    assert {"cell_id", "slice_id", "library_size", "position"} <= set(columns)
    for key in ("draw", "spatial_reconstructed_uncertainty", "library_size"):
        if key in expected.obs:
            np.testing.assert_array_equal(found.obs[key], expected.obs[key])
    if "sd" in expected.layers:
        np.testing.assert_array_equal(np.stack(columns["sd"]), expected.layers["sd"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.h5ad", "out.parquet"]


def test_a_drawn_tissue_is_written_as_parquet(folder, model_flags, tmp_path):
    tokens = ["--sample-mode", "joint", "--n-cells", "30", "--n-samples", "2", *STEPS]
    assert run("sample", *model_flags, *tokens, "--output", tmp_path / "out.parquet") == 0
    drawn = read_parquet(tmp_path / "out.parquet")
    assert drawn.obs["slice_id"].value_counts().to_dict() == {"sample_0": 30, "sample_1": 30}
    # Its latent representation can be extracted.
    tokens = ["--input-data", tmp_path / "out.parquet", "--output", tmp_path / "z.npz"]
    assert run("extract", *model_flags, *tokens) == 0


def test_embeddings_in_every_form(folder, model_flags, model, cells, tmp_path):
    expected = model.get_latent_representation(cells)
    for suffix in ("npz", "parquet", "h5ad"):
        tokens = ["--input-data", folder / "query.h5ad", "--output", tmp_path / f"z.{suffix}"]
        assert run("extract", *model_flags, *tokens) == 0
    table = pq.read_table(tmp_path / "z.parquet")
    assert table.column_names == ["cell_id", "slice_id", "embedding"]
    assert str(table.schema.field("embedding").type) == "fixed_size_list<element: float>[16]"
    np.testing.assert_array_equal(np.stack(table.column("embedding").to_numpy()), expected)
    assert table.column("cell_id").to_pylist() == cells.obs_names.tolist()
    assert table.column("slice_id").to_pylist() == cells.obs["slice_id"].tolist()
    latent = ad.read_h5ad(tmp_path / "z.h5ad")
    assert latent.X is None
    told = latent.uns["X_alphastomics"]
    assert (told["function"], told["params"]["layer"]) == ("get_latent_representation", "transformer")
    np.testing.assert_array_equal(latent.obsm["X_alphastomics"], expected)
    pd.testing.assert_frame_equal(latent.obs, cells.obs)
    with np.load(tmp_path / "z.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["latent"], expected)
        assert arrays["obs_names"].tolist() == cells.obs_names.tolist()


@pytest.mark.slow  # scanpy compiles
def test_scanpy_takes_the_embedding_as_it_is(folder, model_flags, tmp_path):
    sc = pytest.importorskip("scanpy")
    tokens = ["--input-data", folder / "query.h5ad", "--output", tmp_path / "z.h5ad"]
    assert run("extract", *model_flags, *tokens) == 0
    latent = ad.read_h5ad(tmp_path / "z.h5ad")
    sc.pp.neighbors(latent, n_neighbors=5, use_rep="X_alphastomics")
    assert latent.obsp["connectivities"].nnz > 0


def test_cells_without_slices_have_none(folder, model_flags, cells, tmp_path):
    del cells.obs["slice_id"]
    cells.write_h5ad(tmp_path / "bare.h5ad")
    tokens = ["--input-data", tmp_path / "bare.h5ad", "--output", tmp_path / "z.parquet"]
    assert run("extract", *model_flags, *tokens) == 0
    assert pq.read_table(tmp_path / "z.parquet").column_names == ["cell_id", "embedding"]


# -- tensors ----------------------------------------------------------------------------------------------------------------

GENES = ("a", "b", "c")


def test_padded_contexts_are_slices_without_padding(tmp_path):
    expression = torch.arange(24, dtype=torch.float32).reshape(2, 4, 3)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    expression[mask == 0] = float("nan")
    positions = torch.rand(2, 4, 3)
    torch.save({"expression": expression, "positions": positions, "mask": mask}, tmp_path / "x.pt")
    cells = read_tensors(tmp_path / "x.pt", GENES)
    assert cells.obs_names.tolist() == ["cell_0_0", "cell_0_1", "cell_0_2", "cell_1_0", "cell_1_1"]
    assert cells.obs["slice_id"].tolist() == ["0", "0", "0", "1", "1"]
    np.testing.assert_array_equal(cells.X.toarray(), expression[mask == 1].numpy())
    np.testing.assert_array_equal(cells.obsm["spatial"], positions[mask == 1].double().numpy())
    assert tuple(cells.var_names) == GENES


@pytest.mark.parametrize(
    ("slices", "expected"),
    [([7, 3], ["7", "7", "3", "3"]), ([[1, 1], [1, 2]], ["1", "1", "1", "2"]), (None, ["0", "0", "1", "1"])],
)
def test_slice_ids_of_contexts_can_be_given(slices, expected, tmp_path):
    tensors = {"expression": torch.ones(2, 2, 3)}
    torch.save(tensors if slices is None else tensors | {"slice_id": torch.tensor(slices)}, tmp_path / "x.pt")
    assert read_tensors(tmp_path / "x.pt", GENES).obs["slice_id"].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
def test_numbers_of_any_kind_are_read(dtype, tmp_path):
    torch.save({"expression": torch.arange(6).reshape(2, 3).to(dtype)}, tmp_path / "x.pt")
    cells = read_tensors(tmp_path / "x.pt", GENES)
    np.testing.assert_array_equal(cells.X.toarray(), [[0, 1, 2], [3, 4, 5]])
    assert cells.obs_names.tolist() == ["cell_0", "cell_1"]
    assert list(cells.obs) == []


X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (X, "Tensor"),
        ([X], "list"),
        ({}, "'expression'"),
        ({"expression": X, "weights": X}, "'weights'"),
        ({"expression": [1.0]}, "'expression'.*list"),
        ({"expression": X[0]}, r"'expression'.*\(3,\)"),
        ({"expression": X[:, :2]}, "'expression'.* 2 .* 3 genes"),
        ({"expression": X.bool()}, "'expression'.*bool"),
        ({"expression": X * 1j}, "'expression'.*complex64"),
        ({"expression": X.to_sparse()}, "'expression'.*dense"),
        ({"expression": X.to("meta")}, "'expression'.*dense"),
        ({"expression": X / 0}, "'expression'.*infinite"),
        ({"expression": X[:0]}, "no cells"),
        ({"expression": X, "positions": X[:3]}, r"'positions'.*\(3, 3\).*\(4, 2\).*\(4, 3\)"),
        ({"expression": X, "positions": torch.ones(4, 4)}, r"'positions'.*\(4, 4\)"),
        ({"expression": X, "positions": X, "position": X}, "'positions'.*'position'"),
        ({"expression": X, "slice_id": torch.ones(4)}, "'slice_id'.*float32"),
        ({"expression": X, "slice_id": torch.ones(3).int()}, r"'slice_id'.*\(3,\)"),
        ({"expression": X, "mask": torch.full((4,), 2)}, "'mask'"),
        ({"expression": X, "mask": torch.zeros(4)}, "no cells"),
        ({"expression": X, "mask": torch.ones(3)}, r"'mask'.*\(3,\)"),
    ],
)
def test_tensors_of_wrong_shape_give_a_short_error(values, message, tmp_path):
    torch.save(values, tmp_path / "x.pt")
    with pytest.raises(ValueError, match=rf"x\.pt.*{message}"):
        read_tensors(tmp_path / "x.pt", GENES)


class Attack:
    """What creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("form", ["torch", "torch, old", "pickle"])
def test_code_in_a_file_is_not_run(form, folder, model_flags, tmp_path, capsys):
    values, target = {"expression": torch.ones(4, 20), "positions": Attack(tmp_path / "hit")}, tmp_path / "x.pt"
    if form == "pickle":
        target.write_bytes(pickle.dumps(values))
    else:
        torch.save(values, target, _use_new_zipfile_serialization=form == "torch")
    before = sorted(tmp_path.iterdir())
    assert run("sample", *model_flags, "--input-data", target, "--output", tmp_path / "out.h5ad") == 1
    assert "x.pt " in error_line(capsys)
    assert sorted(tmp_path.iterdir()) == before
    torch.load(target, weights_only=False) if form != "pickle" else pickle.loads(target.read_bytes())
    assert (tmp_path / "hit").exists()  # it would have been


@pytest.mark.parametrize("form", ["torch", "pickle"])
@pytest.mark.parametrize("name", ["x.h5ad", "x.parquet", "x.pt", "x.ckpt", "model", "run/checkpoints/last.ckpt"])
def test_a_crafted_pickle_is_an_error_in_every_command(form, name, folder, model_flags, tmp_path, capsys):
    """As cells, as a checkpoint, as a model, and in the folder of a run."""
    target = tmp_path / name
    file = target / "model.safetensors" if name == "model" else target
    file.parent.mkdir(parents=True, exist_ok=True)
    attack = {"state_dict": Attack(tmp_path / "hit")}
    torch.save(attack, file) if form == "torch" else file.write_bytes(pickle.dumps(attack))
    if name == "model":
        shutil.copy(folder / "model" / "config.json", target)
    given = [*model_flags, "--input-data", target]
    if name.endswith(("ckpt", "model")):
        path = tmp_path / "run" if name.startswith("run") else target
        given = ["--checkpoint", path, "--input-data", folder / "query.h5ad", "--accelerator", "cpu"]
    assert run("sample", *given, "--output", tmp_path / "out.h5ad") == 1
    assert re.search(rf"{file}|{target} ", error_line(capsys))
    assert not (tmp_path / "hit").exists()
    with file.open("rb") as opened:
        torch.load(opened, weights_only=False) if form == "torch" else pickle.load(opened)
    assert (tmp_path / "hit").exists()  # it would have been


# -- bad input ----------------------------------------------------------------------------------------------------------------


def test_suffixes():
    check_suffix(Path("a.b.h5ad"), (".h5ad", ".parquet"))
    with pytest.raises(ValueError, match=r"a\.csv.*\.h5ad, \.parquet or \.pt"):
        check_suffix(Path("a.csv"), (".h5ad", ".parquet", ".pt"))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["sample", "--output", "out.h5ad"], "--input-data or --data-dir"),
        (["sample", "--input-data", "query.h5ad", "--output", "out.csv"], r"out\.csv.*\.h5ad.*\.parquet"),
        (["sample", "--input-data", "text.csv", "--output", "out.h5ad"], r"text\.csv.*\.h5ad, \.parquet"),
        (["extract", "--input-data", "query.h5ad", "--output", "z"], r"z .*\.npz, \.parquet or \.h5ad"),
        (
            ["sample", "--input-data", "query.h5ad", "--data-dir", "dataset", "--output", "out.h5ad"],
            "--input-data and --data-dir",
        ),
        (["test", "--input-data", "query.h5ad", "--split", "test"], "--split.*--data-dir"),
        (["test", "--data-dir", "empty"], r"metadata\.json.*alphastomics preprocess"),
        (["sample", "--sample-mode", "joint", "--output", "out.h5ad"], "--n-cells"),
        (
            ["sample", "--data-dir", "dataset", "--sample-mode", "joint", "--n-cells", "9", "--output", "out.h5ad"],
            "--n-cells.*input",
        ),
        (
            ["sample", "--input-data", "query.h5ad", "--n-cells", "9", "--output", "out.h5ad"],
            "--n-cells.*--sample-mode joint",
        ),
        (["extract", "--input-data", "text.pt", "--output", "z.npz"], r"text\.pt"),
        (["extract", "--input-data", "cut.pt", "--output", "z.parquet"], r"cut\.pt"),
        (["extract", "--input-data", "cut.h5ad", "--output", "z.h5ad"], r"cut\.h5ad"),
        (["extract", "--input-data", "cut.parquet", "--output", "z.npz"], r"cut\.parquet"),
        (["extract", "--input-data", "really.parquet", "--output", "z.npz"], r"really\.parquet"),
        (["sample", "--input-data", "nan.pt", "--output", "out.parquet"], "X .*NaN"),
        (["test", "--input-data", "nowhere.pt"], r'nowhere\.pt.*obsm\["spatial"\]'),
        (
            ["extract", "--input-data", "nowhere.pt", "--use-positions", "--output", "z.npz"],
            r'nowhere\.pt.*obsm\["spatial"\]',
        ),
        (["extract", "--input-data", "others.h5ad", "--output", "z.npz"], r"others\.h5ad.* 20 .*20 genes"),
        (["test", "--input-data", "line.h5ad"], r'line\.h5ad.*obsm\["spatial"\].* 1 .* 2\b'),
        (["test", "--data-dir", "logs"], "logs.*transformed"),
    ],
)
def test_an_error_has_a_short_message_and_nothing_is_written(
    folder, model_flags, cells, tokens, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "query.h5ad", "query.h5ad")
    shutil.copytree(folder / "dataset", "dataset")
    Path("empty").mkdir()
    for name in ("text.csv", "text.pt"):
        Path(name).write_text("no")
    save_tensors("whole.pt", cells)
    others = cells.copy()
    others.var_names = [f"other_{i}" for i in range(20)]
    others.write_h5ad("others.h5ad")
    flat = cells.copy()
    flat.obsm["spatial"] = flat.obsm["spatial"][:, :1]
    flat.write_h5ad("line.h5ad")
    save_tensors("nowhere.pt", cells, positions=None)
    save_tensors("nan.pt", cells, expression=torch.full((cells.n_obs, 20), float("nan")))
    shutil.copy("query.h5ad", "really.parquet")
    for whole in ("whole.pt", "query.h5ad", "dataset/data/test.parquet"):
        data = Path(whole).read_bytes()
        Path(f"cut{Path(whole).suffix}").write_bytes(data[: len(data) // 2])
    if "logs" in tokens:
        shutil.copytree("dataset", "logs")
        note = json.loads(Path("logs/metadata.json").read_text())
        note["schema"] |= {"transform": "none", "library_size": None, "gene_share": []}
        Path("logs/metadata.json").write_text(json.dumps(note))
    before = sorted(tmp_path.rglob("*"))
    assert run(*tokens[:1], *model_flags, *tokens[1:]) == 1
    assert re.search(message, error_line(capsys))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_leaves_no_partial_file(folder, model_flags, tmp_path, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    (tmp_path / "out.parquet").write_text("old")
    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    tokens = ["--input-data", folder / "query.h5ad", "--output", tmp_path / "out.parquet"]
    assert run("sample", *model_flags, *tokens) == 1
    assert "No space left on device" in error_line(capsys)
    assert (tmp_path / "out.parquet").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]
