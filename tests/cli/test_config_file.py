"""Flags take precedence over the file, the file over the defaults, and the result is printed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError

from alphastomics.cli._options import FitOptions, SetupOptions
from alphastomics.cli._run import RunOptions, SourceOptions
from alphastomics.config import Config, NetworkConfig, PlanConfig
from alphastomics.main import app, main

FILE = """
seed: {global_seed: 42}
model: {d_model: 256, use_moe: true, num_experts: 8, moe_top_k: 2, attention: linear,
        layer_sharing: block, sharing_block: 2}
diffusion: {num_timesteps: 1000, prediction_type: x0}
training: {mode: joint, batch_size: 512, learning_rate: 1e-4, gpus: 2, fp16: true, early_stopping: true}
masking: {enable: true, expression_mask_ratio: 0.4}
losses: {lambda_neighbor: 0}
run: {exp_name: mine, test_after_train: true}
"""


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Options of ``train`` with a file of some text, by group."""

    def run(text: str, *tokens: str) -> dict[str, Any]:
        monkeypatch.chdir(tmp_path)
        Path("c.yaml").write_text(text)
        command = ["train", "--config", "c.yaml", *tokens]
        return app.parse_args(command, exit_on_error=False, print_error=False)[1].arguments

    return run


def test_a_file_sets_options(parse):
    found = parse(FILE)
    assert found["options"] == FitOptions(
        mode="joint", d_model=256, use_moe=True, num_experts=8, attention="linear", prediction_type="x0", enable_masking=True,
        layer_sharing="block", sharing_block=2, batch_size=512, gpus=2, fp16=True, early_stopping=True,
        expression_mask_ratio=0.4, lr=1e-4, lambda_neighbor=0.0,
    )  # fmt: skip
    assert found["run"] == RunOptions(seed=42, exp_name="mine", test_after_train=True)


LONG = {
    "context_size": "auto",
    "context_growth": "geometric",
    "shortest_context": 64,
    "growth_warmup": 10,
    "growth_steps": 200,
    "micro_batch_size": 512,
    "memory_budget": 7.5,
    "recompute": 3,
}


def test_long_contexts_are_set_in_a_file_or_by_flags(parse):
    flags = [part for name, value in LONG.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    in_file = parse(f"training: {LONG}".replace("'", ""))["options"]
    assert in_file == parse("", *flags)["options"] == FitOptions(**LONG)
    assert parse("training: {recompute: all, context_size: 7}")["options"] == FitOptions(
        recompute="all", context_size=7
    )
    for wrong in (["--recompute", "some"], ["--context-size", "0"], ["--context-growth", "cubic"]):
        with pytest.raises(CycloptsError):
            parse("", *wrong)


@pytest.mark.parametrize(
    ("tokens", "group", "expected"),
    [
        (["--d-model", "32"], "options", {"d_model": 32, "num_experts": 8}),
        (["--lr", "1e-3"], "options", {"lr": 1e-3, "lambda_neighbor": 0.0}),
        (["--no-early-stopping"], "options", {"early_stopping": False}),
        (["--exp-name", "other"], "run", {"exp_name": "other", "test_after_train": True}),
        # A setting of the file without effect is dropped.
        (["--no-moe"], "options", {"use_moe": False, "num_experts": 4, "d_model": 256}),
        (["--attention", "axial"], "options", {"attention": "axial", "layer_sharing": "block", "sharing_block": 2}),
        (["--layer-sharing", "universal"], "options", {"layer_sharing": "universal", "sharing_block": 4}),
        (["--disable-masking"], "options", {"enable_masking": False, "expression_mask_ratio": 0.3}),
        # A flag replaces another key with the same meaning.
        (["--use-gated-attention"], "options", {"use_gated_attention": True, "attention": None}),
        (["--accelerator", "cpu"], "options", {"accelerator": "cpu", "gpus": None, "devices": "auto"}),
        (["--precision", "32-true"], "options", {"precision": "32-true", "fp16": False}),
    ],
)
def test_flags_take_precedence_over_the_file(parse, tokens, group, expected):
    found = parse(FILE, *tokens)[group]
    assert {name: getattr(found, name) for name in expected} == expected


def test_learning_rate_schedule_from_file_and_command_line(parse):
    text = "training: {lr_schedule: linear, final_lr: 0.3}"
    assert parse(text)["options"] == FitOptions(lr_schedule="linear", final_lr=0.3)
    assert parse(text, "--lr-schedule", "constant")["options"] == FitOptions(lr_schedule="constant", final_lr=0.3)
    with pytest.raises(CycloptsError):
        parse("", "--lr-schedule", "step")


def test_distributed_training_from_file_and_command_line(parse, capsys):
    text = "training: {strategy: fsdp2, devices: 4, num_nodes: 2, context_parallel_size: 2}"
    expected = FitOptions(strategy="fsdp2", devices=4, num_nodes=2, context_parallel_size=2)
    assert parse(text)["options"] == expected
    assert parse(text, "--strategy", "ddp")["options"] == replace(expected, strategy="ddp")
    assert main(["train", "--config", "c.yaml", "--print-config"]) == 0
    printed = parse(capsys.readouterr().out)["options"]
    spread = ("strategy", "devices", "num_nodes", "context_parallel_size")
    assert [getattr(printed, name) for name in spread] == ["fsdp2", 4, 2, 2]


def test_a_dataset_overrides_the_input_file_of_the_configuration(parse, tmp_path):
    (tmp_path / "ds").mkdir()
    (tmp_path / "x.h5ad").touch()
    text = "data: {input_data: x.h5ad, preprocessing: {layer: counts}, loading: {streaming: true, buffer_size: 9}}"
    assert parse(text)["source"] == SourceOptions(input_data=Path("x.h5ad"))
    assert parse(text)["setup"] == SetupOptions(layer="counts")
    found = parse(text, "--data-dir", "ds")
    assert found["source"] == SourceOptions(data_dir=Path("ds"), streaming=True, buffer_size=9)
    assert "setup" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {d_model: 0}", r"c\.yaml: model\.d_model"),
        ("training: {gpus: -1}", r"c\.yaml: training\.gpus"),
        ("model: {dropout: 3}", r"c\.yaml: model\.dropout"),
        ("training: {learning_rate: -1}", r"c\.yaml: training\.learning_rate"),
        ("data: {loading: {num_workers: -1}}", r"c\.yaml: data\.loading\.num_workers"),
    ],
)  # fmt: skip
def test_values_out_of_range_name_the_file_and_the_key(parse, text, message):
    with pytest.raises(CycloptsError, match=message):
        parse(text)


def test_other_errors_name_the_file_and_the_key(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("training: {learning_rat: 1}")
    assert main(["train", "--config", str(tmp_path / "c.yaml")]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(r"alphastomics: .*/c\.yaml: .*training\.learning_rat\b.*training\.learning_rate\b.*\n", error)
    assert main(["train", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_keys_without_effect_are_logged(parse, caplog):
    caplog.set_level("INFO", logger="alphastomics")
    parse(FILE)
    (record,) = caplog.records
    assert re.search(r"c\.yaml.*diffusion\.num_timesteps: 1000\b", record.getMessage())


def test_the_resulting_configuration_is_printed_as_a_file_of_the_same(parse, tmp_path, capsys):
    expected = parse(FILE, "--d-model", "32")
    assert main(["train", "--config", "c.yaml", "--d-model", "32", "--print-config"]) == 0
    text = capsys.readouterr().out
    again = parse(text)
    assert again["options"] == replace(expected["options"], use_gated_attention=False)
    assert again["run"] == expected["run"]
    printed = Config.read("c.yaml")
    assert (printed.model.d_model, printed.model.n_layers, printed.training.learning_rate) == (32, 4, 1e-4)
    assert list(tmp_path.iterdir()) == [tmp_path / "c.yaml"]
    assert main(["train", "--config", "c.yaml", "--print-config"]) == 0
    assert capsys.readouterr().out == text


def test_the_configuration_is_printed_without_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("model: {d_model: 7}")  # which is not passed
    assert main(["train", "--print-config", "--data-dir", "nowhere", "--streaming", "--enable-masking"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# null: ")
    Path("won.yaml").write_text(text)
    won = Config.read("won.yaml")
    assert (won.model.d_model, won.model.attention, won.model.use_gated_attention) == (
        NetworkConfig.d_model,
        "full",
        True,
    )
    assert (won.training.learning_rate, won.training.gradient_clip_val) == (PlanConfig.lr, 1.0)
    assert (won.masking.expression_mask_ratio, won.masking.position_mask_ratio) == (0.3, 0.33)
    assert (won.data.loading.buffer_size, won.data.processed_data_dir) == (2**20, Path("nowhere"))
    # These follow from the data.
    assert (won.model.dropout, won.augmentation.deformation, won.augmentation.thinning) == (None, None, None)


@pytest.mark.parametrize(("section", "option"), [("processed_data_dir", "--data-dir"), ("input_data", "--input-data")])
def test_missing_data_are_an_error_before_training(section, option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(f"data: {{{section}: nowhere}}")
    assert main(["train", "--config", "c.yaml"]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(rf'alphastomics: "nowhere" does not exist.*{option}, or data\.{section} .*file\n', error)
    assert list(tmp_path.iterdir()) == [tmp_path / "c.yaml"]


def test_the_home_folder_is_expanded_in_files_and_flags(parse, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("run: {output_dir: ~/runs}")["run"].output_dir == tmp_path / "runs"
    assert main(["train", "--config=~/c.yaml", "--data-dir=~/cells", "--exp-name=~x=~", "--print-config"]) == 0
    printed = parse(capsys.readouterr().out)
    assert printed["source"].data_dir == tmp_path / "cells"
    assert printed["run"] == RunOptions(output_dir=tmp_path / "runs", exp_name="~x=~")


def test_a_run_that_is_resumed_keeps_its_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.yaml").write_text("model: {d_model: 48}\nrun: {exp_name: old, output_dir: moved}")

    def parsed(*tokens: str) -> dict[str, Any]:
        command = ["train", "--exp_name", "mine", "--output-dir", "runs", *tokens]
        return app.parse_args(command, exit_on_error=False, print_error=False)[1].arguments

    assert parsed("--resume")["options"] == FitOptions(d_model=48)
    assert parsed("--resume", "last")["options"] == FitOptions(d_model=48)
    Path("runs").rename("outputs")
    found = app.parse_args(["train", "--exp-name", "mine", "--resume"], exit_on_error=False, print_error=False)[
        1
    ].arguments
    assert found["run"] == RunOptions(exp_name="mine", resume=())
    assert found["options"] == FitOptions(d_model=48)
    Path("outputs").rename("runs")
    assert parsed("--resume", "--d-model", "16")["options"] == FitOptions(d_model=16)
    assert "options" not in parsed()
    assert "options" not in parsed("--resume-from", "last.ckpt")
    of_a_file = parsed("--resume-from", "runs/mine/checkpoints/last.ckpt")
    assert of_a_file["options"] == FitOptions(d_model=48)
    assert of_a_file["run"].folder().path == Path("runs/mine")
    assert parsed("--resume", "last")["options"] == FitOptions(d_model=48)
    Path("runs").rename("moved")
    assert "options" not in parsed("--resume", "last")
    Path("moved").rename("runs")
    assert parsed("--resume_from", "last.ckpt")["run"].resume == (Path("last.ckpt"),)
    Path("c.yaml").write_text("model: {n_layers: 1}")
    assert parsed("--resume", "--config", "c.yaml")["options"] == FitOptions(n_layers=1)
