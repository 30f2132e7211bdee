"""Configuration files: what is written is read, files of the earlier version too, and errors name the key."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import HealthCheck, given, settings, strategies as st

from alphastomics.config import Config, DiffusionSection, ModelSection, TrainingSection

ROOT = Path(__file__).parents[2]
README = """
seed:
  global_seed: 42
  deterministic: false
model:
  num_genes: 20000
  d_model: 256
  n_heads: 8
  n_layers: 6
  dropout: 0.1
diffusion:
  num_timesteps: 1000
  schedule: cosine
  prediction_type: x0
training:
  mode: joint
  batch_size: 1024
  learning_rate: 1e-4
  max_epochs: 100
masking:
  enable: true
  expression_mask_ratio: 0.4
  position_mask_ratio: 0.3
data:
  processed_data_dir: ./processed
  preprocessing:
    normalize_position: false  # positions as they are
    scale: true
  loading:
    num_workers: 4
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    """Options that a file gives."""
    return Config.read(written(tmp_path, text)).options()


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of the type of a key, None among them."""
    finite = st.floats(allow_nan=False, allow_infinity=False)
    kinds = {
        NoneType: st.none(), bool: st.booleans(), int: st.integers(), float: finite, str: st.text(max_size=12), Path: st.text(max_size=12).map(Path),
    }  # fmt: skip
    return st.one_of([st.sampled_from(get_args(k)) if get_origin(k) is Literal else kinds[k] for k in get_args(hint)])


def sections(section: Any) -> st.SearchStrategy[Any]:
    """Sections with any values of the types of their keys."""
    hints = get_type_hints(type(section))
    values = {
        entry.name: sections(default)
        if is_dataclass(default := getattr(section, entry.name))
        else values_of(hints[entry.name])
        for entry in fields(section)
    }
    return st.builds(type(section), **values)


@given(config=sections(Config()))
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_written_configuration_is_read(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("c") / "c.yaml"
    config.write(path)
    assert Config.read(path) == config
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text", ["1e-4", "010", "1:30", "no", "null", "~", "", "0x1f", "1_000", ".inf", "2026-01-01", "<<", " a ", "a: b"]
)
def test_strings_like_other_yaml_types_stay_strings(tmp_path, text):
    path = tmp_path / "c.yaml"
    Config(training=TrainingSection(accelerator=text)).write(path)
    assert Config.read(path).training.accelerator == text
    assert yaml.safe_load(path.read_text())["training"]["accelerator"] == text, "another reader sees something else"


def test_the_layout_of_the_readme(tmp_path):
    assert read(tmp_path, README) == {
        "seed": 42, "deterministic": False, "num_genes": 20000, "d_model": 256, "n_heads": 8, "n_layers": 6, "dropout": 0.1,
        "schedule": "cosine", "prediction_type": "x0", "mode": "joint", "batch_size": 1024, "lr": 1e-4, "max_epochs": 100,
        "enable_masking": True, "expression_mask_ratio": 0.4, "position_mask_ratio": 0.3, "data_dir": Path("processed"),
        "num_workers": 4,
    }  # fmt: skip
    assert Config.read(tmp_path / "c.yaml").diffusion.num_timesteps == 1000


def test_the_layout_of_transformer_layers(tmp_path):
    text = """
TransformerLayer_setting:
  num_layers: 6
  num_heads: 8
  dropout: 0.2
  use_gated_attention: true    # recommended
  gate_type: "headwise"
  use_qk_norm: true
  use_moe: true
  num_experts: 8
  moe_top_k: 2
  moe_load_balance_loss_weight: 0.01
training:
  batch_size: 512
  accumulate_grad_batches: 2
  gradient_clip_val: 0.5
"""
    assert read(tmp_path, text) == {
        "n_layers": 6, "n_heads": 8, "dropout": 0.2, "use_gated_attention": True, "gate_type": "headwise", "use_qk_norm": True,
        "use_moe": True, "num_experts": 8, "moe_top_k": 2, "moe_load_balance_loss_weight": 0.01, "batch_size": 512,
        "accumulate_grad_batches": 2, "gradient_clip_val": 0.5,
    }  # fmt: skip
    # What is read so is written in the other layout.
    again = tmp_path / "again.yaml"
    Config.read(tmp_path / "c.yaml").write(again)
    assert "TransformerLayer_setting" not in again.read_text()
    assert Config.read(again) == Config.read(tmp_path / "c.yaml")


def test_a_mapping_of_python_is_read_too():
    found = Config.from_dict(
        {"TransformerLayer_setting": {"use_moe": True, "num_experts": 4}, "training": {"learning_rate": "1e-4"}}
    )
    assert found.model == ModelSection(use_moe=True, num_experts=4)
    assert found.training.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("training: {learning_rate: 1e-4}", "lr", 1e-4),
        ("training: {learning_rate: 1E+2}", "lr", 100.0),
        ("training: {learning_rate: .5}", "lr", 0.5),
        ("training: {learning_rate: 1}", "lr", 1.0),
        ("training: {max_epochs: 010}", "max_epochs", 10),
        ("training: {max_time: 90}", "max_time", 90.0),
        ("training: {max_time: 1:00:00:00}", "max_time", "1:00:00:00"),
        ("training: {devices: 2}", "devices", 2),
        ("training: {devices: '0,1'}", "devices", "0,1"),
        ("model: {gate_type: none}", "gate_type", "none"),
        ("masking: {enable: True}", "enable_masking", True),
    ],
)
def test_values(tmp_path, text, option, value):
    found = read(tmp_path, text)
    assert found == {option: value}
    assert type(found[option]) is type(value)


@pytest.mark.parametrize("text", ["", "# nothing", "model:", "model: {d_model: null}", "data: {loading: }"])
def test_an_empty_file_is_an_empty_configuration(tmp_path, text):
    assert Config.read(written(tmp_path, text)) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("traning: {}", r"traning\b.* training\b"),
        ("model: {d_modell: 3}", r"model\.d_modell\b.* model\.d_model\b"),
        ("training: {lr: 1e-4}", r"training\.lr\b.* training\.learning_rate\b"),
        ("model: {batch_size: 4}", r"model\.batch_size\b.* training\.batch_size\b"),
        ("data: {loading: {workers: 4}}", r"data\.loading\.workers\b.* data\.loading\.num_workers\b"),
        ("TransformerLayer_settings: {}", r"TransformerLayer_settings\b.* TransformerLayer_setting\b"),
        ("TransformerLayer_setting: {d_model: 4}", r"TransformerLayer_setting\.d_model\b.* model\.d_model\b"),
        ("TransformerLayer_setting: {num_layer: 4}", r"TransformerLayer_setting\.num_layer\b.* TransformerLayer_setting\.num_layers\b"),
        ("TransformerLayer_setting: {num_layers: 4}\nmodel: {n_layers: 4}", r"TransformerLayer_setting\.num_layers\b.* model\.n_layers\b"),
        ("1: {}", r"key 1\b"),
        ("model: {d_model: '3'}", r"model\.d_model .*whole number.*'3'"),
        ("model: {d_model: 3.5}", r"model\.d_model .*whole number.*3.5"),
        ("model: {d_model: true}", r"model\.d_model .*whole number.*true"),
        ("model: {dropout: a lot}", r"model\.dropout .*number.*'a lot'"),
        ("model: {dropout: .nan}", r"model\.dropout .*number.*'.nan'"),
        ("model: {dropout: [1]}", r"model\.dropout .*number.*list"),
        ("model: {dropout: {a: 1}}", r"model\.dropout .*number.*section"),
        ("model: {use_moe: yes}", r"model\.use_moe .*true or false.*'yes'"),
        ("model: {gate_type: soft}", r"model\.gate_type .*headwise, elementwise, none.*'soft'"),
        ("training: {precision: 16}", r"training\.precision .*text.*16"),
        ("data: {input_data: 3}", r"data\.input_data .*path.*3"),
        ("model: 3", r"model .*section.*3"),
        ("model: [d_model]", r"model .*section.*list"),
        ("- model", "section.*list"),
        ("model: {d_model: 1, d_model: 2}", "line 1: .*'d_model'"),
        ("a: &a 1\nb: *a", "line 2: .*references"),
        ("model:\n\t- x", "line 2: "),
        ("{", "line 1: "),
        ("? [1]\n: 2", "keys"),
        ("a\0b", "YAML"),
        ("[" * 50_000, "YAML"),
        (f"model: {{d_model: {'9' * 5000}}}", "YAML"),
        ("a: !!python/object/apply:os.system ['true']", "line 1: .*constructor"),
        ("a: !!timestamp x", "YAML"),
        ("#" * (2**16 + 1), "65,536 bytes"),
    ],
)  # fmt: skip
def test_invalid_files_raise_with_a_reason(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(str(path)) + r"[:, ].*" + message):
        Config.read(path)


def test_binary_files_raise(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="YAML"):
        Config.read(tmp_path / "c.yaml")
    with pytest.raises(OSError, match="none.yaml"):
        Config.read(tmp_path / "none.yaml")


def test_nested_references_raise_before_expansion(tmp_path):
    levels = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))
    with pytest.raises(ValueError, match="references"):
        Config.read(written(tmp_path, f"a0: &a0 x\n{levels}"))


def test_a_message_is_short(tmp_path):
    with pytest.raises(ValueError, match="d_model") as error:
        Config.read(written(tmp_path, f"model: {{d_model: {'x' * 60_000}}}"))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("diffusion: {num_timesteps: 1000}", ["diffusion.num_timesteps: 1000"]),
        ("data: {preprocessing: {normalize_position: false, scale: true}}", []),
        (
            "data: {preprocessing: {normalize_position: true, scale: false}}",
            ["data.preprocessing.normalize_position: true", "data.preprocessing.scale: false"],
        ),
    ],
)
def test_keys_without_effect_are_listed(tmp_path, text, keys):
    assert Config.read(written(tmp_path, text)).without_effect() == keys


def test_options_and_sections_hold_the_same():
    options = {entry.name: f"{entry.key}!" for entry, _ in Config()._items() if not entry.details.file_only}
    config = Config.from_options(options)
    assert config.options() == options
    assert config.diffusion == DiffusionSection(
        schedule="diffusion.schedule!", prediction_type="diffusion.prediction_type!",
        nu="diffusion.nu!",
    )  # fmt: skip


def test_the_example_of_the_page_is_read(tmp_path):
    page = (ROOT / "docs" / "configuration.md").read_text()
    examples = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert len(examples) == 2
    assert all(read(tmp_path, text) for text in examples)
