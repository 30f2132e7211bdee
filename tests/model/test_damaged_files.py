"""Loading a damaged or foreign model raises, and runs no code of it."""

from __future__ import annotations

import json
import pickle
import shutil
import time

import pytest
from safetensors.torch import load_file, save_file

from alphastomics.model import AlphaSTomics
from files import Trap, files_in


def test_a_pickled_model_raises_and_is_not_opened(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "model.pt").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(FileNotFoundError, match=r"config\.json.*model\.pt"):
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
def test_missing_file_raises(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        AlphaSTomics.load(folder, adata=False)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        AlphaSTomics.load(folder / "nowhere", adata=False)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_file_raises(folder, name, keep):
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=name):
        AlphaSTomics.load(folder, adata=False)


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "text", ['{"format": "of another program"}', "[1, 2]", "3", "null", "{}"], ids=["other", "list", "3", "null", "{}"]
)
def test_other_json_raises(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        AlphaSTomics.load(folder, adata=False)


@pytest.mark.parametrize(("key", "value"), [("format_version", 99), ("class", "SCVI")])
def test_another_version_or_class_raises(folder, key, value):
    edit(folder, lambda config: config.update({key: value}))
    with pytest.raises(ValueError, match=str(value)):
        AlphaSTomics.load(folder, adata=False)


@pytest.mark.parametrize("key", ["class", "init", "registry", "is_trained", "history", "frame", "deformation"])
def test_missing_key_raises(folder, key):
    edit(folder, lambda config: config.pop(key))
    with pytest.raises(ValueError, match=rf"{folder}.*{'None' if key == 'class' else key}"):
        AlphaSTomics.load(folder, adata=False)


def schema_of(config):
    return config["registry"]["field_registries"]["tissue"]["state_registry"]["schema"]


DAMAGE = {
    "no schema": lambda config: config["registry"]["field_registries"].pop("tissue"),
    "no scale": lambda config: schema_of(config).pop("scale"),
    "negative scale": lambda config: schema_of(config).update(scale=-1.0),
    "genes a number": lambda config: schema_of(config).update(genes=7),
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
def test_damaged_configuration_raises(folder, change):
    edit(folder, change)
    with pytest.raises(ValueError, match="."):
        AlphaSTomics.load(folder, adata=False)


@pytest.mark.parametrize("wrap", ['{{"format": "alphastomics-model", "registry": {}}}', "{}"], ids=["inside", "bare"])
def test_deeply_nested_json_raises(folder, wrap):
    depth = 200_000
    (folder / "config.json").write_text(wrap.format("[" * depth + "]" * depth))
    with pytest.raises(ValueError, match=r"config.json"):
        AlphaSTomics.load(folder, adata=False)


def test_weights_of_other_shapes_raise(folder, make_model, reference, tmp_path):
    make_model(reference, d_model=16).save(tmp_path / "narrow")
    shutil.copy(tmp_path / "narrow" / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(ValueError, match="size mismatch"):
        AlphaSTomics.load(folder, adata=False)


def test_missing_weights_raise(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["position_out.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"position_out\.weight"):
        AlphaSTomics.load(folder, adata=False)


def test_failed_save_keeps_the_existing_model(trained, folder, monkeypatch):
    before = files_in(folder)
    monkeypatch.setitem(trained.init_params_["non_kwargs"], "mode", object())
    with pytest.raises(TypeError):
        trained.save(folder, overwrite=True)
    assert files_in(folder) == before


@pytest.mark.parametrize(
    "name",
    [
        "marginals.true",
        "dependence.share",
        *(f"reference_cells.{part}" for part in ("position", "slice", "expression", "sequence")),
    ],
)
def test_fitted_values_of_another_tissue_raise(everything, tmp_path, name):
    everything.save(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"fitted.{name}"] = tensors[f"fitted.{name}"][..., :-1].contiguous()
    save_file(tensors, path)
    with pytest.raises(ValueError, match=name.partition(".")[0]):
        AlphaSTomics.load(tmp_path / "m", adata=False)


# -- crafted files -----------------------------------------------------------------------------------------------------


def assert_raises(folder, message):
    """The error is one line with the folder or its file and a remedy."""
    with pytest.raises(ValueError, match=message) as caught:
        AlphaSTomics.load(folder, adata=False)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "; " in str(caught.value)


def with_header(folder, change):
    """Change the header of the weights."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = change(json.loads(data[8 : 8 + size]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


def enormous(header):
    header["position_out.weight"]["shape"] = [2**40, 2**20]
    return header


def overlapping(header):
    names = list(header)
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    return header


HEADERS = {
    "nested": lambda header: b'{"a":' * 100_000,
    "enormous": enormous,
    "overlapping": overlapping,
    "many": lambda header: (
        header | {f"x{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(9999)}
    ),
    "list": lambda header: [1, 2],
    "no text": lambda header: b"\xff" * 100,
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS)
def test_a_crafted_header_raises(folder, change):
    with_header(folder, change)
    assert_raises(folder, r"model\.safetensors is truncated or not a safetensors file|weight 'x")


@pytest.mark.parametrize("size", [2**63, 2**40, 200_000_000])
def test_a_header_with_a_false_length_takes_no_memory(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    assert_raises(folder, r"model\.safetensors is truncated or not a safetensors file")


def test_weights_larger_than_memory_are_not_read(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2**43)  # with a hole: it takes no room
    assert_raises(folder, r"model\.safetensors is .*8,192 GiB")


@pytest.mark.parametrize(
    "change",
    [
        {"d_model": 10**9},
        {"d_model": 2**62},
        {"d_model": 50_000},
        {"n_layers": 10**9},
        {"n_layers": 900},
        {"use_moe": True, "num_experts": 10**6},
        {"use_moe": True, "num_experts": 10**12},
        {"residual": "hyper", "n_streams": 10**5},
        {"n_heads": 10**9},
        {"n_layers": "2"},
        {"n_layers": -1},
    ],
    ids=str,
)
def test_a_network_of_other_weights_is_not_built(folder, change, monkeypatch):
    """Neither its memory is taken, nor the time to make a thousand million layers."""
    edit(folder, lambda config: config["init"].update(change))
    monkeypatch.setattr(AlphaSTomics, "__init__", lambda *_, **__: pytest.fail("the network was made"))
    start = time.monotonic()
    assert_raises(folder, "complete model: ")
    assert time.monotonic() - start < 5


def test_non_finite_or_non_float_weights_raise(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"position_out.bias": tensors["position_out.bias"] * float("nan")}, path)
    assert_raises(folder, "position_out.bias is NaN or infinite")
    save_file(tensors | {"position_out.bias": tensors["position_out.bias"].long()}, path)
    assert_raises(folder, "'position_out.bias' does not contain floating-point")
    save_file(tensors | {"another": tensors["position_out.bias"].clone()}, path)
    assert_raises(folder, "no weight 'another'")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_outside_of_the_folder_raises(folder, tmp_path, name):
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert_raises(folder, rf"{name} is a link")
    (folder / "inside").write_bytes((tmp_path / "elsewhere").read_bytes())
    (folder / name).unlink()
    (folder / name).symlink_to("inside")
    assert AlphaSTomics.load(folder, adata=False).is_trained_
    linked = tmp_path / "linked"
    linked.symlink_to(folder, target_is_directory=True)
    assert AlphaSTomics.load(linked, adata=False).is_trained_


def test_links_are_allowed_only_in_the_hub_cache(folder, tmp_path):
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "abc", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in folder.iterdir():
        shutil.copy(path, blobs / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    assert AlphaSTomics.load(snapshot, adata=False).is_trained_
    (snapshot / "config.json").unlink()
    shutil.copy(folder / "config.json", tmp_path / "cache" / "secret")
    (snapshot / "config.json").symlink_to(tmp_path / "cache" / "secret")
    assert_raises(snapshot, "is a link")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"is_trained"', '"init": 1, "is_trained"'), "a key occurs twice"),
        (lambda text: text.replace("true", "NaN", 1), "NaN is not a JSON number"),
        (lambda text: text.replace("true", "9" * 1000, 1), "exceeds 64 bits"),
        (lambda text: text + " " * 2**26, "larger than 67,108,864 bytes"),
    ],
    ids=["twice", "NaN", "giant", "long"],
)
def test_an_oversized_configuration_raises(folder, change, message):
    path = folder / "config.json"
    path.write_text(change(path.read_text()))
    assert_raises(folder, rf"config\.json is truncated or not JSON: .*{message}")


def test_a_registry_of_other_data_raises(folder):
    edit(folder, lambda config: config["registry"]["field_registries"]["X"]["summary_stats"].update(n_vars=7))
    assert_raises(folder, "60 genes")
    edit(folder, lambda config: config["registry"]["field_registries"]["X"]["summary_stats"].update(n_vars=60))
    edit(
        folder,
        lambda config: config["registry"]["field_registries"]["position"]["state_registry"].update(column_names=7),
    )
    assert_raises(folder, "position")
    edit(folder, lambda config: config["registry"]["field_registries"].pop("slice"))
    assert_raises(folder, "complete model: ")
    edit(folder, lambda config: config["registry"]["setup_args"].update(adata="x", unheard_of=1))
    assert_raises(folder, "complete model: ")


def test_invalid_data_beside_a_model_raise(folder):
    (folder / "adata.h5ad").write_bytes(b"no")
    with pytest.raises(ValueError, match=r"adata\.h5ad"):
        AlphaSTomics.load(folder)
    assert AlphaSTomics.load(folder, adata=False).is_trained_
