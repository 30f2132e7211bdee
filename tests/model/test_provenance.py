"""The training records of a model and the provenance of its samples."""

from __future__ import annotations

import getpass
import json
import logging
import platform
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

import anndata as ad
import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from alphastomics._provenance import TIMES, device_name, digest, versions
from alphastomics.model import AlphaSTomics
from alphastomics.train import TrainingPlan


@pytest.fixture(scope="module")
def model(_reference, make_model, train_briefly):
    adata = _reference[np.r_[0:100, 300:400]].copy()
    return train_briefly(
        make_model(adata, mode="any", random_state=11),
        max_epochs=2,
        num_workers=0,
        plan_kwargs={"lr_schedule": "linear"},
        limit_val_batches=1,
    )


def test_training_record(model):
    (training,) = model.trainings_
    finished = datetime.fromisoformat(training["finished"])
    assert abs((datetime.now(UTC) - finished).total_seconds()) < 600
    assert 0 < training["seconds"] < 600
    expected = {
        "interrupted": False, "seed": 11, "n_steps": 2, "n_epochs": 2, "n_cells": 200, "n_genes": 60, "n_slices": 2,
        "precision": "32-true", "device": "cpu", "n_devices": 1, "versions": versions(),
        "system": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip
    assert {name: training[name] for name in expected} == expected
    assert set(training) == {*expected, "arguments", "plan", "held_out", *TIMES}
    assert training["held_out"]["n_scored"] == 100  # one of two slices
    assert -1 < training["held_out"]["distance_spearman"] < 1
    asked = {"max_epochs": 2, "context_size": 128, "batch_size": 384, "accelerator": "cpu", "limit_val_batches": 1}
    assert training["arguments"].items() >= asked.items()
    # Defaults are recorded as they were resolved.
    assert training["arguments"]["augmentation"]["thinning"] == model.default_augmentation().thinning
    assert training["arguments"]["n_recomputed"] == 0
    assert training["plan"]["lr_schedule"] == "linear"
    assert training["plan"]["deformation"] == model.fitted_.deformation
    assert set(training["plan"]) == {field.name for field in fields(TrainingPlan(model.module).config)}


def test_records_are_saved_loaded_and_appended(model, small, train_briefly, tmp_path):
    model.save(tmp_path / "m")
    stored = json.loads((tmp_path / "m/config.json").read_text())
    assert stored["provenance"]["trainings"] == list(model.trainings_)
    loaded = AlphaSTomics.load(tmp_path / "m", adata=small)
    assert loaded.trainings_ == model.trainings_
    train_briefly(loaded, max_epochs=1, precision="bf16-mixed")
    first, second = loaded.trainings_
    assert first == model.trainings_[0]
    assert (second["n_epochs"], second["precision"]) == (1, "bf16-mixed")


def test_a_checkpoint_has_the_record(small, make_model, train_briefly, tmp_path):
    path = tmp_path / "last.ckpt"
    model = train_briefly(make_model(small), checkpoint=path)
    assert AlphaSTomics.load(path, adata=False).trainings_ == model.trainings_


def test_a_model_without_provenance_is_loaded(model, tmp_path):
    model.save(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    del config["provenance"]
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    loaded = AlphaSTomics.load(tmp_path / "m", adata=False)
    assert loaded.trainings_ == ()
    assert loaded.sample(n_cells=4, mode="joint", n_steps=1).uns["alphastomics"]["training"] == {}


DEEP: list = []
for _ in range(9):
    DEEP = [DEEP]


@pytest.mark.parametrize("bad", [None, 3, [], {"trainings": 3}, {"trainings": [3]}, {"trainings": [{"a": DEEP}]}])
def test_malformed_records_raise(model, tmp_path, bad):
    model.save(tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    config["provenance"] = bad
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="provenance"):
        AlphaSTomics.load(tmp_path / "m", adata=False)


class Interrupting(pl.Callback):
    """Ctrl-C before the second step."""

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 1:
            raise KeyboardInterrupt


def test_an_interrupted_training_is_recorded_as_such(small, make_model, train_briefly):
    model = train_briefly(make_model(small), max_epochs=5, callbacks=[Interrupting()])
    assert (model.trainings_[0]["interrupted"], model.trainings_[0]["n_steps"]) == (True, 1)


def test_records_name_no_path_machine_or_user(small, make_model, train_briefly, tmp_path):
    model = train_briefly(
        make_model(small),
        checkpoint=tmp_path / "secret.ckpt",
        default_root_dir=str(tmp_path),
        callbacks=[Interrupting()],
    )
    model.save(tmp_path / "m")
    text = (tmp_path / "m/config.json").read_text() + repr(model.sample().uns["spatial_reconstructed"])
    for name in (str(tmp_path), "secret", str(Path.home()), platform.node()):
        assert name not in text
    assert f"/{getpass.getuser()}" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "expr_to_pos", "n_samples": 2, "random_state": np.int64(5)},
        {"mode": "pos_to_expr", "n_steps": 1, "reduce": "mean"},
        {"mode": "joint", "n_steps": 1, "n_cells": 20},
        {"mode": "expr_to_pos", "indices": np.arange(30)},
    ],
    ids=["expr_to_pos", "pos_to_expr", "joint", "indices"],
)
def test_a_sample_has_its_provenance(model, arguments, tmp_path):
    sampled = model.sample(**arguments)
    key = "spatial_reconstructed" if arguments["mode"] == "expr_to_pos" else "alphastomics"
    found = sampled.uns[key]
    asked = {name: value for name, value in arguments.items() if name != "indices"}
    assert found["params"].items() >= asked.items()
    assert found["params"].get("indices") == ("30 rows" if "indices" in arguments else None)
    assert found["function"] == "sample"
    assert found["versions"] == versions()
    assert found["machine"] == {"device": "cpu", "system": f"{platform.system()} {platform.machine()}"}
    assert found["model"].items() >= {"mode": "any", "d_model": 32, "weights": digest(model)}.items()
    assert found["training"]["seed"] == 11
    assert found["training"]["plan"]["lr_schedule"] == "linear"
    assert not set(found["training"]) & set(TIMES), "the same seed would not give the same file"
    sampled.write_h5ad(tmp_path / "x.h5ad")
    assert ad.read_h5ad(tmp_path / "x.h5ad").uns[key] == found


def test_digest_of_the_weights(model, small, make_model, tmp_path):
    model.save(tmp_path / "m")
    assert digest(AlphaSTomics.load(tmp_path / "m", adata=False)) == digest(model)
    other = make_model(small)
    before = digest(other)
    with torch.no_grad():
        next(other.module.parameters()).view(-1)[0] += 1e-6
    assert digest(other) != before
    assert len(before) == 16


def test_device_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert device_name(torch.device("cuda:0")) == "cuda (NVIDIA H200)"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert device_name(torch.device("cuda:0")) == "cuda"
    assert device_name(torch.device("cpu")) == "cpu"


def test_a_failed_training_leaves_no_record(small, make_model, train_briefly, caplog):
    model = make_model(small)
    assert model.trainings_ == ()
    with caplog.at_level(logging.ERROR), pytest.raises(ValueError, match="positive"):
        train_briefly(model, max_time=-1)
    assert model.trainings_ == ()
