"""Flags, their aliases, and the arguments that they become."""

from __future__ import annotations

from typing import Any

import pytest
from cyclopts import App, CycloptsError

from alphastomics.cli._options import ComparisonOptions, DemoOptions, FitOptions
from alphastomics.config import Augmentation, MaskingConfig
from alphastomics.main import app


def parse(*tokens: str) -> dict[str, Any]:
    return app.parse_args(tokens, exit_on_error=False, print_error=False)[1].arguments


@pytest.fixture
def train_tokens(tmp_path) -> list[str]:
    (tmp_path / "x.h5ad").touch()
    return ["train", "--input-data", str(tmp_path / "x.h5ad"), "--output-dir", str(tmp_path / "m")]


def test_given_augmentation_changes_that_of_the_data():
    suited = Augmentation(gene_dropout=0.7, thinning=0.6, gene_noise=0.4)
    assert FitOptions().training_arguments(suited)["augmentation"] == suited
    changed = FitOptions(thinning=0.25, rotate=False).training_arguments(suited)["augmentation"]
    assert changed == Augmentation(gene_dropout=0.7, thinning=0.25, gene_noise=0.4, rotate=False)


def test_masking_is_an_argument_of_training_for_a_model_with_masks():
    options = FitOptions(enable_masking=True, mask_strategy="block", mask_ramp_steps=9)
    assert options.training_arguments(Augmentation())["masking"] == MaskingConfig(
        mask_strategy="block", mask_ramp_steps=9
    )
    assert FitOptions().training_arguments(Augmentation())["masking"] is None


def test_derived_arguments_are_passed_only_if_given():
    assert "deformation" not in FitOptions().training_arguments(Augmentation())["plan_kwargs"]
    plan = FitOptions(lambda_neighbor=0.0, deformation=0.1).training_arguments(Augmentation())["plan_kwargs"]
    assert (plan["lambda_neighbor"], plan["deformation"]) == (0.0, 0.1)


def test_several_values_follow_one_flag(tmp_path):
    (tmp_path / "x.h5ad").touch()
    tokens = ["compare", "--input-data", str(tmp_path / "x.h5ad"), "--output", str(tmp_path / "c")]
    found = parse(*tokens, "--seeds", "0", "4", "--configurations", "linear", "gated", "--held-out", "a")
    assert found["output_dir"] == tmp_path / "c"
    assert found["options"] == ComparisonOptions(seeds=(0, 4), configurations=("linear", "gated"), held_out=("a",))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("--training-mode joint", FitOptions(mode="joint")),
        ("--n-layers=2 --epochs 3", FitOptions(n_layers=2, max_epochs=3)),
        ("--no-use-qk-norm --no-rotate", FitOptions(use_qk_norm=False, rotate=False)),
        ("--no-gated-attention", FitOptions(use_gated_attention=False)),
        ("--use-gated-attention", FitOptions(use_gated_attention=True)),
        ("--attention neighbor --sparse-pairs hybrid", FitOptions(attention="neighbor", sparse_pairs="hybrid")),
        ("--pair-features factorized --rank auto --attention geometric", FitOptions(pair_features="factorized", attention="geometric")),
        ("--use-moe --moe-top-k=1 --expert-width full", FitOptions(use_moe=True, moe_top_k=1, expert_width="full")),
        ("--no-moe --disable-masking", FitOptions(use_moe=False, enable_masking=False)),
        ("--enable-masking --expression-mask-ratio .4", FitOptions(enable_masking=True, expression_mask_ratio=0.4)),
        ("--nu 2 --lr 1e-4", FitOptions(nu=2.0, lr=1e-4)),
        ("--max-time 90", FitOptions(max_time=90.0)),
        ("--max-time 00:01:00:00", FitOptions(max_time="00:01:00:00")),
        ("--devices 0,1", FitOptions(devices="0,1")),
        ("--strategy fsdp2 --devices 4 --num-nodes 2", FitOptions(strategy="fsdp2", devices=4, num_nodes=2)),
    ],
)  # fmt: skip
def test_flags(train_tokens, tokens, expected):
    assert parse(*train_tokens, *tokens.split())["options"] == expected


def test_flags_of_the_earlier_version_mean_the_same(train_tokens):
    """Its full example, with underscores as it wrote them."""
    tokens = """
        --use_gated_attention --gate_type elementwise --use_moe --num_experts 8 --moe_top_k 2 --enable_masking
        --expression_mask_ratio 0.3 --position_mask_ratio 0.33 --batch_size 64 --epochs 100 --lr 1e-4
        --training_mode joint --gpus 2 --num_workers 4 --seed 42
    """
    parsed = parse(*train_tokens, *tokens.split())
    assert parsed["run"].seed == 42
    assert parsed["options"] == FitOptions(
        mode="joint", use_gated_attention=True, gate_type="elementwise", use_moe=True, num_experts=8, moe_top_k=2, lr=1e-4,
        enable_masking=True, max_epochs=100, batch_size=64, gpus=2, num_workers=4, expression_mask_ratio=0.3,
        position_mask_ratio=0.33,
    )  # fmt: skip
    off = parse(*train_tokens, "--no_gated_attention", "--no_moe", "--disable_masking")["options"]
    assert off.model_arguments() == FitOptions(attention="linear").model_arguments()


def test_demo_keeps_its_defaults_beside_given_flags(tmp_path):
    arguments = parse("demo", "--output-dir", str(tmp_path), "--d-model", "32", "--epochs", "2")
    assert arguments["options"] == DemoOptions(d_model=32, max_epochs=2)


def test_aliases_become_arguments():
    assert FitOptions(use_gated_attention=False).model_arguments()["attention"] == "linear"
    arguments = FitOptions(gpus=2, devices="auto", fp16=True).training_arguments(Augmentation())
    assert (arguments["accelerator"], arguments["devices"], arguments["precision"]) == ("gpu", 2, "16-mixed")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--attention", "full", "--no-use-gated-attention"], "--attention full.*--no-use-gated-attention"),
        (["--attention", "linear", "--use-gated-attention"], "--attention linear.*--use-gated-attention"),
        (["--attention", "geometric", "--no-use-gated-attention"], "--attention geometric.*--no-use-gated"),
        (["--n-neighbors", "8"], "--n-neighbors.*--attention neighbor"),
        (["--rank", "8", "--attention", "geometric"], "--rank.*--pair-features factorized"),
        (["--num-experts", "8"], "--num-experts.*--use-moe"),
        (["--mask-strategy", "block"], "--mask-strategy.*--enable-masking"),
        (["--buffer-size", "8"], "--buffer-size.*--streaming"),
        (["--distance-clamp", "2"], "--distance-clamp.*--distance-loss clamped or huber"),
        (["--fp16", "--precision", "64-true"], "--fp16.*--precision"),
        (["--gpus", "2", "--accelerator", "cpu"], "--gpus.*--accelerator.*--devices"),
        (["--gpus", "2", "--devices", "1"], "--gpus.*--accelerator.*--devices"),
    ],
)
def test_contradicting_flags_raise(train_tokens, tokens, message):
    with pytest.raises(ValueError, match=message):
        parse(*train_tokens, *tokens)


@pytest.mark.parametrize(
    ("tokens", "attention"),
    [
        (["--attention", "linear", "--no-gated-attention"], "linear"),
        (["--attention", "full", "--use-gated-attention"], "full"),
        (["--use-gated-attention"], "full"),
    ],
)
def test_repeated_equal_flags_are_accepted(train_tokens, tokens, attention):
    assert parse(*train_tokens, *tokens)["options"].kind_of_attention == attention


@pytest.mark.parametrize(
    "tokens",
    [
        ["--d-model", "0"], ["--epochs", "0"], ["--mode", "both"], ["--dmodel", "8"], ["--dropout", "3"], ["--lr", "-1"],
        ["--lr", "nan"], ["--ema_decay", "3"], ["--gradient_clip_val", "-1"], ["--warmup_steps", "-5"],
        ["--num_workers", "-1"], ["--augmentation", "1"], ["--recompute", "-1"], ["--expression-mask-ratio", "1.5"], ["--validation-size", "1"], ["--weight-decay", "-1"],
    ],
)  # fmt: skip
def test_invalid_values_are_errors_before_the_work(train_tokens, tokens):
    with pytest.raises(CycloptsError, match=tokens[0]):
        parse(*train_tokens, *tokens)


def test_commands():
    assert isinstance(app, App)
    names = "demo reconstruct preprocess stage1 stage2 train sample test extract provenance compare upload"
    assert [name for name in app if not name.startswith("-")] == names.split()
