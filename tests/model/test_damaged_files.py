"""A damaged or foreign model on disk is refused, and never run."""

from __future__ import annotations

import json
import pickle
import shutil

import pytest
from safetensors.torch import load_file, save_file

from alphastomics.model import AlphaSTomics


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickled_model_is_named_and_not_opened(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.pt").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(FileNotFoundError, match=r"config.json is missing.*model.pt is there.*never opened"):
        AlphaSTomics.load(folder)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("protocol", [0, 4])
def test_a_disguised_pickle_is_not_opened(folder, reference, tmp_path, name, protocol):
    trap = pickle.dumps(Trap(tmp_path / "sprung"), protocol=protocol)
    pickle.loads(trap).close()
    assert (tmp_path / "sprung").exists(), "the trap does not work"
    (tmp_path / "sprung").unlink()
    (folder / name).write_bytes(trap)
    with pytest.raises(ValueError, match=name):
        AlphaSTomics.load(folder, adata=reference)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name} is missing"):
        AlphaSTomics.load(folder, adata=False)
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        AlphaSTomics.load(folder / "nowhere", adata=False)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_is_named(folder, name, keep):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=f"{name}.*truncated"):
        AlphaSTomics.load(folder, adata=False)


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "text", ['{"format": "of another program"}', "[1, 2]", "3", "null", "{}"], ids=["other", "list", "3", "null", "{}"]
)
def test_json_of_something_else_is_refused(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match="does not describe a model of AlphaSTomics"):
        AlphaSTomics.load(folder, adata=False)


def test_other_format_version_is_refused(folder):
    edit(folder, lambda config: config.update(format_version=99))
    with pytest.raises(ValueError, match="format version 99"):
        AlphaSTomics.load(folder, adata=False)


def test_other_class_is_refused(folder):
    edit(folder, lambda config: config.update({"class": "SCVI"}))
    with pytest.raises(ValueError, match="holds a model of 'SCVI', not of AlphaSTomics"):
        AlphaSTomics.load(folder, adata=False)


@pytest.mark.parametrize("key", ["class", "init", "registry", "is_trained", "history", "frame"])
def test_missing_key_is_named(folder, key):
    edit(folder, lambda config: config.pop(key))
    with pytest.raises(ValueError, match=rf"{folder}.*{'None' if key == 'class' else key}"):
        AlphaSTomics.load(folder, adata=False)


DAMAGE = {
    "no schema": lambda config: config["registry"].pop("tissue_schema"),
    "no scale": lambda config: config["registry"]["tissue_schema"].pop("scale"),
    "negative scale": lambda config: config["registry"]["tissue_schema"].update(scale=-1.0),
    "genes a number": lambda config: config["registry"]["tissue_schema"].update(genes=7),
    "registry a list": lambda config: config.update(registry=[]),
    "unheard-of argument": lambda config: config["init"].update(unheard_of=1),
    "unknown mode": lambda config: config["init"].update(mode="backwards"),
    "width a word": lambda config: config["init"].update(d_model="wide"),
    "no rotation": lambda config: config["frame"].pop("rotation"),
    "frame a list": lambda config: config.update(frame=[1, 2]),
    "epochs of words": lambda config: config.update(history={"train_loss": {"first": 1.0}}),
    "deformation a word": lambda config: config.update(deformation="strong"),
    "deformation true": lambda config: config.update(deformation=True),
    "deformation infinite": lambda config: config.update(deformation=float("inf")),
    "history a number": lambda config: config.update(history=3),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_damaged_configuration_is_refused(folder, change):
    edit(folder, change)
    with pytest.raises(ValueError, match="."):
        AlphaSTomics.load(folder, adata=False)


@pytest.mark.parametrize("wrap", ['{{"format": "alphastomics-model", "registry": {}}}', "{}"], ids=["inside", "bare"])
def test_nested_json_is_no_bomb(folder, wrap):
    depth = 200_000
    (folder / "config.json").write_text(wrap.format("[" * depth + "]" * depth))
    with pytest.raises(ValueError, match=r"config.json"):
        AlphaSTomics.load(folder, adata=False)


def test_weights_of_other_shapes_are_refused(folder, make_model, reference, tmp_path):
    make_model(reference, d_model=16).save(tmp_path / "narrow")
    shutil.copy(tmp_path / "narrow" / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)whole model.*size mismatch"):
        AlphaSTomics.load(folder, adata=False)


def test_weights_that_are_missing_are_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["position_out.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)whole model.*position_out\.weight"):
        AlphaSTomics.load(folder, adata=False)


def test_failed_save_leaves_the_model_that_was_there(trained, folder, monkeypatch):
    before = contents(folder)
    monkeypatch.setitem(trained.init_params_["non_kwargs"], "mode", object())
    with pytest.raises(TypeError):
        trained.save(folder, overwrite=True)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["marginals.true", "dependence.share", "outlines.quantiles", "exemplars.expression"])
def test_what_was_fitted_to_another_tissue_is_named(everything, tmp_path, name):
    everything.save(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"fitted.{name}"] = tensors[f"fitted.{name}"][..., :-1].contiguous()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"{name.partition('.')[0]} do not fit"):
        AlphaSTomics.load(tmp_path / "m", adata=False)
