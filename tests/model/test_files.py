"""A model on disk: what comes back, and what is overwritten."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from alphastomics.model import AlphaSTomics
from files import files_in


def test_saved_and_loaded_without_data_it_samples_the_same_bytes(trained, folder, reference, positions_of, weights_of):
    loaded = AlphaSTomics.load(folder, adata=False)
    assert loaded.adata is None
    assert loaded.mode == "expr_to_pos"
    assert loaded.is_trained_
    assert loaded.schema == trained.schema
    assert loaded.fitted_.frame == trained.fitted_.frame
    assert weights_of(loaded) == weights_of(trained)
    for arguments in ({}, {"n_samples": 2, "reduce": "medoid"}):
        expected = positions_of(trained.sample(reference, **arguments))
        assert positions_of(loaded.sample(reference, **arguments)) == expected
    latent = trained.get_latent_representation(reference)
    assert loaded.get_latent_representation(reference).tobytes() == latent.tobytes()


def test_nothing_is_unpickled(folder, monkeypatch, reference):
    def fail(*_, **__):
        pytest.fail("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, fail)
    assert AlphaSTomics.load(folder, adata=False).is_trained_
    assert AlphaSTomics.load(folder, adata=reference).adata is reference


def test_history_comes_back(trained, folder):
    loaded = AlphaSTomics.load(folder, adata=False)
    assert list(loaded.history) == list(trained.history)
    for name, table in trained.history.items():
        pd.testing.assert_frame_equal(loaded.history[name], table)


def test_two_files_are_written_and_nothing_else(folder):
    assert sorted(files_in(folder)) == ["config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["format"] == "alphastomics-model"
    assert config["versions"].keys() >= {"alphastomics", "torch", "scvi-tools"}
    assert len(load_file(folder / "model.safetensors")) > 10


def test_saving_a_loaded_model_gives_the_same_files(folder, tmp_path):
    AlphaSTomics.load(folder, adata=False).save(tmp_path / "again")
    assert files_in(tmp_path / "again") == files_in(folder)


def test_loaded_with_data_it_trains_on(folder, reference, train_briefly, positions_of):
    loaded = AlphaSTomics.load(folder, adata=reference)
    assert loaded.adata is reference
    before = positions_of(loaded.sample())
    epochs = len(loaded.history["train_loss"])
    train_briefly(loaded)
    assert len(loaded.history["train_loss"]) == epochs + 1
    assert positions_of(loaded.sample()) != before


def test_loaded_without_data_training_raises(folder, train_briefly):
    loaded = AlphaSTomics.load(folder)
    assert loaded.adata is None
    with pytest.raises(ValueError, match="adata="):
        train_briefly(loaded)
    with pytest.raises(ValueError, match="adata"):
        loaded.sample()
    with pytest.raises(ValueError, match="adata"):
        loaded.get_latent_representation(indices=[0, 1])


def test_reference_can_be_saved_beside_the_model(trained, tmp_path, positions_of, assert_same):
    trained.save(tmp_path / "m", save_anndata=True)
    loaded = AlphaSTomics.load(tmp_path / "m")
    assert (loaded.adata.X != trained.adata.X).nnz == 0
    assert positions_of(loaded.sample()) == positions_of(trained.sample())
    assert AlphaSTomics.load(tmp_path / "m", adata=False).adata is None


def test_scvi_views_work_on_a_loaded_model(folder, reference, capsys):
    loaded = AlphaSTomics.load(folder, adata=reference)
    loaded.view_anndata_setup()
    repr(loaded)
    shown = capsys.readouterr().out
    assert "adata.obsm['spatial']" in shown
    assert "mode='expr_to_pos'" in shown


def test_an_untrained_model_comes_back_untrained(make_model, reference, tmp_path):
    make_model(reference, random_state=np.int64(3)).save(tmp_path / "m")
    loaded = AlphaSTomics.load(tmp_path / "m", adata=False)
    assert not loaded.is_trained_
    assert loaded.init_params_["non_kwargs"]["random_state"] == 3
    with pytest.raises(RuntimeError, match="not trained"):
        loaded.sample(reference)


def test_wrong_data_raise(folder, reference):
    del reference.obs["slice_id"]
    reference.obsm["spatial"] = reference.obsm["spatial"][:, [0, 1, 1]]
    with pytest.raises(ValueError, match=r"spatial.*3") as caught:
        AlphaSTomics.load(folder, adata=reference)
    assert "complete model" not in str(caught.value)


def test_data_without_the_layer_are_not_reported_as_damage(make_model, reference, tmp_path):
    reference.layers["counts"] = reference.X.copy()
    make_model(reference, setup={"layer": "counts"}).save(tmp_path / "m")
    del reference.layers["counts"]
    with pytest.raises(KeyError, match="counts"):
        AlphaSTomics.load(tmp_path / "m", adata=reference)


def test_a_model_from_before_these_options_loads(folder, reference, positions_of, trained):
    config = json.loads((folder / "config.json").read_text())
    names = "attention use_moe num_experts moe_top_k expert_width pair_features rank sparse_pairs n_neighbors residual"
    for name in f"{names} n_streams layer_sharing sharing_block bottleneck".split():
        del config["init"][name]
    (folder / "config.json").write_text(json.dumps(config))
    loaded = AlphaSTomics.load(folder, adata=False)
    assert positions_of(loaded.sample(reference)) == positions_of(trained.sample(reference))


# -- overwriting -------------------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_not_overwritten_unasked(trained, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        trained.save(tmp_path)
    assert files_in(tmp_path) == {"notes.txt": b"mine"}
    trained.save(tmp_path, overwrite=True)
    assert sorted(files_in(tmp_path)) == ["config.json", "model.safetensors", "notes.txt"]
    assert AlphaSTomics.load(tmp_path, adata=False).is_trained_


def test_an_empty_folder_is_used(trained, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    trained.save(tmp_path / "a" / "b")
    trained.save(str(tmp_path / "new" / "deep"))
    assert AlphaSTomics.load(str(tmp_path / "new" / "deep"), adata=False).is_trained_


def test_overwriting_leaves_no_data_of_the_model_before(trained, tmp_path, make_model, reference):
    trained.save(tmp_path / "m", save_anndata=True)
    make_model(reference[:, :20].copy()).save(tmp_path / "m", overwrite=True)
    loaded = AlphaSTomics.load(tmp_path / "m")
    assert loaded.schema.n_genes == 20
    assert loaded.adata is None


def test_nothing_is_written_when_there_are_no_data_to_save(folder, tmp_path):
    loaded = AlphaSTomics.load(folder, adata=False)
    with pytest.raises(ValueError, match="data"):
        loaded.save(tmp_path / "m", save_anndata=True)
    assert not (tmp_path / "m").exists()


def test_prefix_raises(trained, folder, tmp_path):
    with pytest.raises(ValueError, match="prefix"):
        trained.save(tmp_path / "m", prefix="best_")
    with pytest.raises(ValueError, match="prefix"):
        AlphaSTomics.load(folder, prefix="best_")
