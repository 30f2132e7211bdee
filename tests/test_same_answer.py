"""One model and one query: every function and every command gives the same placement and the same scores."""

from __future__ import annotations

import json

import anndata as ad
import numpy as np
import pytest

from alphastomics import tl
from alphastomics.datasets import synthetic_tissue
from alphastomics.main import main

KEY = "spatial_reconstructed"
MODEL = {"d_model": 16, "n_layers": 1, "n_heads": 2}
TRAINING = {"context_size": 64, "accelerator": "cpu", "devices": 1, "enable_progress_bar": False}
SCORES = ["distance_spearman", "knn_preservation", "contact_precision"]
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``reference.h5ad``; the cells of another slice in ``truth.h5ad``, and without positions in ``query.h5ad``."""
    folder = tmp_path_factory.mktemp("same")
    tissue = synthetic_tissue(n_cells=120, n_genes=30, random_state=0)
    is_query = (tissue.obs["slice_id"] == "slice_2").to_numpy()
    tissue.write_h5ad(folder / "tissue.h5ad")
    tissue[~is_query].write_h5ad(folder / "reference.h5ad")
    query = tissue[is_query].copy()
    query.write_h5ad(folder / "truth.h5ad")
    del query.obsm["spatial"]
    query.write_h5ad(folder / "query.h5ad")
    return folder


def read(folder, name):
    return ad.read_h5ad(folder / f"{name}.h5ad")


@pytest.fixture(scope="module")
def model(folder):
    return tl.reconstruct(
        read(folder, "query"), read(folder, "reference"), adapt=False, return_model=True, max_steps=STEPS, **MODEL, **TRAINING
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(folder, model):
    """Positions of the query, and their scores."""
    truth = read(folder, "truth")
    tl.reconstruct(truth, model=model)
    return truth.obsm[KEY], tl.evaluate(truth).iloc[0]


@pytest.fixture
def run(folder, model, monkeypatch):
    """Runs a command with the saved model in the folder of the files."""
    monkeypatch.chdir(folder)
    if not (folder / "model").exists():
        model.save(folder / "model")
    return lambda *tokens: main([*tokens, "--checkpoint", "model", "--accelerator", "cpu"])


def trained_on_the_reference(folder):
    query = read(folder, "query")
    tl.reconstruct(query, read(folder, "reference"), adapt=False, max_steps=STEPS, **MODEL, **TRAINING)
    return query.obsm[KEY]


def trained_on_the_known_cells(folder):
    tissue = read(folder, "tissue")
    unknown = (tissue.obs["slice_id"] == "slice_2").to_numpy()
    tissue.obsm["spatial"][unknown] = np.nan
    tl.reconstruct(tissue, adapt=False, max_steps=STEPS, **MODEL, **TRAINING)
    return tissue.obsm[KEY][unknown]


@pytest.mark.parametrize("form", [trained_on_the_reference, trained_on_the_known_cells])
def test_forms_of_reconstruct(folder, expected, form):
    np.testing.assert_allclose(form(folder), expected[0], rtol=1e-6)


def test_sample(folder, model, expected):
    np.testing.assert_array_equal(model.sample(read(folder, "query")).obsm["spatial_reconstructed"], expected[0])


def test_several_samples(folder, model, expected):
    query = read(folder, "query")
    tl.reconstruct(query, model=model, n_samples=3)
    np.testing.assert_array_equal(query.obsm[KEY], expected[0])


@pytest.mark.parametrize("command", [["reconstruct", "query.h5ad"], ["sample", "--input-data", "query.h5ad"]])
def test_commands_that_place_cells(folder, run, expected, command):
    output = f"{command[0]}_placed.h5ad"
    assert run(*command, "--output", output) == 0
    position = ad.read_h5ad(folder / output).obsm[KEY]
    np.testing.assert_allclose(position, expected[0], rtol=1e-6)


def test_the_command_test(folder, run, expected):
    assert run("test", "--input-data", "truth.h5ad", "--output", "scores.json") == 0
    found = json.loads((folder / "scores.json").read_text())["slice_2"]["prediction"]
    assert [found[name] for name in SCORES] == pytest.approx(expected[1][SCORES].tolist(), rel=0.01)


def test_compare(folder, expected):
    table = tl.compare(
        read(folder, "tissue"),
        configurations={"default": tl.Configuration(model=MODEL)},
        seeds=[0],
        mode="any",
        max_steps=STEPS,
        n_samples=1,
        n_steps=2,
        **TRAINING,
    )
    assert table.loc["default", SCORES].tolist() == pytest.approx(expected[1][SCORES].tolist(), rel=0.01)


@pytest.mark.real
@pytest.mark.parametrize("name", ["seqfish_mouse_embryo_dev", "starmap_mpfc", "drosophila_bdtnp_3d"])
def test_an_uncertainty_is_added_to_the_placement_of_real_tissue(real_data, name):
    tissue = ad.read_h5ad(real_data / f"{name}.h5ad")
    tissue = tissue[np.random.default_rng(0).permutation(tissue.n_obs)[:900]].copy()
    query, reference = tissue[:300].copy(), tissue[300:].copy()
    query.obs["slice_id"] = "query"
    model = tl.reconstruct(query, reference, adapt=False, return_model=True, max_steps=STEPS, **MODEL, **TRAINING)
    one = query.copy()
    tl.reconstruct(query, model=model, n_samples=8)
    np.testing.assert_array_equal(query.obsm[KEY], one.obsm[KEY])
    assert (query.obs[f"{KEY}_uncertainty"] > 0).all()
    assert f"{KEY}_uncertainty" not in one.obs
