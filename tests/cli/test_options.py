"""Flags, their aliases, and the arguments that they become."""

from __future__ import annotations

from typing import Any

import pytest
from cyclopts import App, CycloptsError

from alphastomics.cli._options import ComparisonOptions, DemoOptions, FitOptions, SetupOptions
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


def test_what_follows_from_the_data_is_not_an_argument_unless_given():
    assert "deformation" not in FitOptions().training_arguments(Augmentation())["plan_kwargs"]
    plan = FitOptions(lambda_neighbor=0.0, deformation=0.1).training_arguments(Augmentation())["plan_kwargs"]
    assert (plan["lambda_neighbor"], plan["deformation"]) == (0.0, 0.1)


def test_several_values_follow_one_flag(tmp_path):
    (tmp_path / "x.h5ad").touch()
    tokens = ["compare", "--input-data", str(tmp_path / "x.h5ad"), "--output", str(tmp_path / "c")]
    found = parse(*tokens, "--seeds", "0", "4", "--configurations", "linear", "gated", "--held-out", "a")
    assert found["output_dir"] == tmp_path / "c"
    assert found["options"] == ComparisonOptions(seeds=(0, 4), configurations=("linear", "gated"), held_out=("a",))


def test_demo_differs_in_few_defaults():
    changed = {name: value for name, value in vars(DemoOptions()).items() if value != getattr(FitOptions(), name)}
    assert changed == {"mode": "expr_to_pos", "max_time": 240.0, "batch_size": 256, "context_size": 256}


@pytest.mark.parametrize(
    ("tokens", "group", "expected"),
    [
        (["--mode", "joint"], "options", FitOptions(mode="joint")),
        (["--training-mode", "joint"], "options", FitOptions(mode="joint")),
        (
            ["--d-model", "32", "--n-layers=2", "--n-heads", "1"],
            "options",
            FitOptions(d_model=32, n_layers=2, n_heads=1),
        ),
        (["--no-use-qk-norm"], "options", FitOptions(use_qk_norm=False)),
        (["--no-gated-attention"], "options", FitOptions(use_gated_attention=False)),
        (["--no-use-gated-attention"], "options", FitOptions(use_gated_attention=False)),
        (["--use-gated-attention"], "options", FitOptions(use_gated_attention=True)),
        (["--gate-type", "elementwise"], "options", FitOptions(gate_type="elementwise")),
        (["--attention", "linear"], "options", FitOptions(attention="linear")),
        (
            "--attention neighbor --sparse-pairs hybrid --n-neighbors 16 --pair-features factorized --rank 8".split(),
            "options",
            FitOptions(attention="neighbor", sparse_pairs="hybrid", n_neighbors=16, pair_features="factorized", rank=8),
        ),
        (
            "--residual hyper --n-streams 2 --layer-sharing block --sharing-block 2 --bottleneck 4 --rank auto".split(),
            "options",
            FitOptions(residual="hyper", n_streams=2, layer_sharing="block", sharing_block=2, bottleneck=4),
        ),
        (
            ["--use-moe", "--num-experts", "8", "--moe-top-k=1", "--expert-width", "full"],
            "options",
            FitOptions(use_moe=True, num_experts=8, moe_top_k=1, expert_width="full"),
        ),
        (["--no-moe"], "options", FitOptions(use_moe=False)),
        (["--moe-load-balance-loss-weight", "0.1"], "options", FitOptions(moe_load_balance_loss_weight=0.1)),
        (
            ["--prediction-type", "x0", "--position-nu", "2"],
            "options",
            FitOptions(prediction_type="x0", position_nu=2.0),
        ),
        (["--epochs", "3"], "options", FitOptions(max_epochs=3)),
        (["--max-epochs", "3"], "options", FitOptions(max_epochs=3)),
        (["--max-time", "90"], "options", FitOptions(max_time=90.0)),
        (["--max-time", "00:01:00:00"], "options", FitOptions(max_time="00:01:00:00")),
        (["--num-workers", "2"], "options", FitOptions(num_workers=2)),
        (["--devices", "2"], "options", FitOptions(devices=2)),
        (["--devices", "0,1"], "options", FitOptions(devices="0,1")),
        (["--gpus", "2"], "options", FitOptions(gpus=2)),
        (
            "--strategy fsdp2 --devices 4 --num-nodes 2 --context-parallel-size 4".split(),
            "options",
            FitOptions(strategy="fsdp2", devices=4, num_nodes=2, context_parallel_size=4),
        ),
        (["--gene-dropout", ".2", "--thinning", ".1"], "options", FitOptions(gene_dropout=0.2, thinning=0.1)),
        (["--lambda-neighbor", "0", "--lr", "1e-4"], "options", FitOptions(lambda_neighbor=0.0, lr=1e-4)),
        (["--enable-masking"], "options", FitOptions(enable_masking=True)),
        (["--disable-masking"], "options", FitOptions(enable_masking=False)),
        (
            [
                "--enable-masking",
                "--expression-mask-ratio",
                ".4",
                "--position-mask-ratio",
                "0.3",
                "--mask-strategy",
                "block",
            ],
            "options",
            FitOptions(enable_masking=True, expression_mask_ratio=0.4, position_mask_ratio=0.3, mask_strategy="block"),
        ),
        (
            [
                "--enable-masking",
                "--masking-probability",
                "1",
                "--initial-mask-share",
                ".1",
                "--mask-ramp-steps",
                "500",
            ],
            "options",
            FitOptions(enable_masking=True, masking_probability=1.0, initial_mask_share=0.1, mask_ramp_steps=500),
        ),
        (["--reconstruction-weight", "2"], "options", FitOptions(reconstruction_weight=2.0)),
        (["--slice-key", "animal", "--frame", "shared"], "setup", SetupOptions(slice_key="animal", frame="shared")),
    ],
)
def test_flags(train_tokens, tokens, group, expected):
    assert parse(*train_tokens, *tokens)[group] == expected


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
def test_flags_that_contradict_each_other_are_refused(train_tokens, tokens, message):
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
def test_flags_that_say_the_same_twice_are_accepted(train_tokens, tokens, attention):
    assert parse(*train_tokens, *tokens)["options"].kind_of_attention == attention


@pytest.mark.parametrize(
    "tokens",
    [
        ["--d-model", "0"], ["--epochs", "0"], ["--mode", "both"], ["--dmodel", "8"], ["--dropout", "3"], ["--lr", "-1"],
        ["--lr", "nan"], ["--ema_decay", "3"], ["--gradient_clip_val", "-1"], ["--warmup_steps", "-5"],
        ["--num_workers", "-1"], ["--augmentation", "1"], ["--recompute", "-1"], ["--expression-mask-ratio", "1.5"], ["--validation-size", "1"], ["--weight-decay", "-1"],
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused_at_once(train_tokens, tokens):
    with pytest.raises(CycloptsError, match=tokens[0]):
        parse(*train_tokens, *tokens)


def test_commands():
    assert isinstance(app, App)
    assert [name for name in app if not name.startswith("-")] == [
        "demo",
        "preprocess",
        "stage1",
        "stage2",
        "train",
        "sample",
        "test",
        "extract",
        "provenance",
        "compare",
        "upload",
    ]
