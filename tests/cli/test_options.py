"""The options repeat choices and defaults of the library, so that help needs no torch: here they are compared."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict, fields
from typing import Any, get_args, get_type_hints

import pytest
from cyclopts import App, CycloptsError

from alphastomics.cli._options import (
    PASSED_ON,
    ComparisonOptions,
    DemoModelOptions,
    DemoTrainingOptions,
    ModelOptions,
    PlanOptions,
    QueryOptions,
    SetupOptions,
    TrainingOptions,
)
from alphastomics.main import app


def parse(*tokens: str) -> dict[str, Any]:
    return app.parse_args(tokens, exit_on_error=False, print_error=False)[1].arguments


@pytest.fixture
def train_tokens(tmp_path) -> list[str]:
    (tmp_path / "x.h5ad").touch()
    return ["train", "--input-data", str(tmp_path / "x.h5ad"), "--output-dir", str(tmp_path / "m")]


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    left_out = {"self", "adata", "registry", "random_state", "kwargs", "trainer_kwargs", "plan_kwargs"}
    return {name: p for name, p in inspect.signature(function).parameters.items() if name not in left_out}


def quoted(annotation: str) -> list[str]:
    return re.findall(r"[\"']([^\"',]+)[\"']", annotation)


def test_model_options_are_those_of_the_model():
    from alphastomics.model import AlphaSTomics

    expected = {name: p.default for name, p in parameters(AlphaSTomics.__init__).items()}
    assert ModelOptions().arguments() == expected


def test_setup_options_are_those_of_the_model():
    from alphastomics.model import AlphaSTomics

    assert asdict(SetupOptions()) == {n: p.default for n, p in parameters(AlphaSTomics.setup_anndata).items()}


def test_training_options_are_those_of_the_model():
    from alphastomics.model import AlphaSTomics

    expected = {name: p.default for name, p in parameters(AlphaSTomics.train).items()}
    arguments = TrainingOptions().arguments(StandIn())
    assert arguments.pop("augmentation") == StandIn().default_augmentation()
    # Not offered: train_size says what validation_size says, and files are the run's.
    others = {"augmentation", "train_size", "checkpoint", "resume", *PASSED_ON}
    assert arguments == {name: expected[name] for name in expected.keys() - others}


class StandIn:
    """The part of a model that the options ask for the augmentation that suits its reference."""

    def default_augmentation(self):
        from alphastomics.data import Augmentation

        return Augmentation(gene_dropout=0.7, thinning=0.6, gene_noise=0.4)


def test_given_augmentation_changes_that_of_the_model():
    from alphastomics.data import Augmentation

    changed = TrainingOptions(thinning=0.25).arguments(StandIn())["augmentation"]
    assert changed == Augmentation(gene_dropout=0.7, thinning=0.25, gene_noise=0.4)
    assert {f.name for f in fields(Augmentation)} - {f.name for f in fields(TrainingOptions)} == {"rotate"}


def test_given_masking_makes_a_configuration():
    from alphastomics.diffusion import MaskingConfig, MaskStrategy

    masking = TrainingOptions(mask_strategy="block", mask_ramp_steps=9).arguments(StandIn())["masking"]
    assert masking == MaskingConfig(mask_strategy="block", mask_ramp_steps=9)
    assert get_args(get_args(get_type_hints(TrainingOptions)["mask_strategy"])[0]) == get_args(MaskStrategy)


def test_help_tells_the_defaults_of_masking():
    from alphastomics.diffusion import MaskingConfig

    for name in ("expression_mask_ratio", "position_mask_ratio", "masking_probability"):
        told = re.search(rf"^    {name}\n.*; (\.\d+) when not given", TrainingOptions.__doc__, flags=re.MULTILINE)
        assert float(told[1]) == getattr(MaskingConfig(), name)


def test_plan_options_are_those_of_the_plan():
    from alphastomics.train import PlanConfig

    assert {field.name for field in fields(PlanOptions)} <= {field.name for field in fields(PlanConfig)}
    assert PlanOptions().arguments() == {}
    assert PlanOptions(lambda_neighbor=0.0, lr=0.1).arguments() == {"lr": 0.1, "lambda_neighbor": 0.0}


def test_comparison_options_are_those_of_the_tool():
    from alphastomics.model import AlphaSTomics
    from alphastomics.tl import compare

    own = {name: p.default for name, p in inspect.signature(compare).parameters.items()}
    passed_on = {n: p.default for f in (AlphaSTomics.__init__, AlphaSTomics.train) for n, p in parameters(f).items()}
    options = ComparisonOptions().arguments()
    assert options == {name: (passed_on | own)[name] for name in options}
    # Not options of this group: what decides the run besides, and what the command names itself.
    others = {"adata", "query", "seeds", "results", "key_added", "kwargs", *asdict(SetupOptions())}
    assert set(own) - others <= set(options)


def test_several_values_follow_one_flag(tmp_path):
    (tmp_path / "x.h5ad").touch()
    tokens = ["compare", "--input-data", str(tmp_path / "x.h5ad"), "--output", str(tmp_path / "c")]
    found = parse(*tokens, "--seeds", "0", "4", "--configurations", "linear", "gated", "--held-out", "a")
    assert found["output_dir"] == tmp_path / "c"
    assert found["seeds"] == (0, 4)
    assert found["options"] == ComparisonOptions(configurations=("linear", "gated"), held_out=("a",))


def test_demo_differs_in_few_defaults():
    assert asdict(DemoModelOptions()) == asdict(ModelOptions(mode="expr_to_pos"))
    assert asdict(DemoTrainingOptions()) == asdict(TrainingOptions(max_time=240.0, batch_size=256, context_size=256))


@pytest.mark.parametrize(
    ("options", "method", "name"),
    [
        (ModelOptions, "__init__", "gate_type"),
        (ModelOptions, "__init__", "attention"),
        (ModelOptions, "__init__", "expert_width"),
        (ModelOptions, "__init__", "pair_features"),
        (ModelOptions, "__init__", "rank"),
        (ModelOptions, "__init__", "sparse_pairs"),
        (ModelOptions, "__init__", "residual"),
        (ModelOptions, "__init__", "layer_sharing"),
        (ModelOptions, "__init__", "schedule"),
        (ModelOptions, "__init__", "prediction_type"),
        (SetupOptions, "setup_anndata", "frame"),
        (SetupOptions, "setup_anndata", "transform"),
        (TrainingOptions, "train", "context_kind"),
    ],
)
def test_choices_are_those_of_the_model(options, method, name):
    from alphastomics.model import AlphaSTomics

    annotation = parameters(getattr(AlphaSTomics, method))[name].annotation
    assert quoted(str(get_type_hints(options)[name])) == quoted(annotation)


@pytest.mark.parametrize("name", ["reduce", "sampler"])
def test_choices_of_sample_are_those_of_the_model(name):
    from alphastomics.main import sample
    from alphastomics.model import AlphaSTomics

    wanted = quoted(inspect.signature(AlphaSTomics.sample).parameters[name].annotation)
    assert quoted(inspect.signature(sample).parameters[name].annotation) == wanted
    assert wanted


def test_modes_are_those_of_training():
    from alphastomics.train import MODES

    assert get_args(get_type_hints(ModelOptions)["mode"]) == MODES


@pytest.mark.parametrize(
    "options", [SetupOptions, ModelOptions, TrainingOptions, PlanOptions, QueryOptions, ComparisonOptions]
)
def test_every_option_has_help(options):
    documented = re.findall(r"^    (\w+)$", inspect.getdoc(options) and options.__doc__ or "", flags=re.MULTILINE)
    assert documented[documented.index("Parameters") + 1 :] == [field.name for field in fields(options)]


@pytest.mark.parametrize(
    ("tokens", "group", "expected"),
    [
        (["--mode", "joint"], "model", ModelOptions(mode="joint")),
        (["--training-mode", "joint"], "model", ModelOptions(mode="joint")),
        (
            ["--d-model", "32", "--n-layers=2", "--n-heads", "1"],
            "model",
            ModelOptions(d_model=32, n_layers=2, n_heads=1),
        ),
        (["--no-use-qk-norm"], "model", ModelOptions(use_qk_norm=False)),
        (["--no-gated-attention"], "model", ModelOptions(use_gated_attention=False)),
        (["--no-use-gated-attention"], "model", ModelOptions(use_gated_attention=False)),
        (["--use-gated-attention"], "model", ModelOptions(use_gated_attention=True)),
        (["--gate-type", "elementwise"], "model", ModelOptions(gate_type="elementwise")),
        (["--attention", "linear"], "model", ModelOptions(attention="linear")),
        (
            "--attention neighbor --sparse-pairs hybrid --n-neighbors 16 --pair-features factorized --rank 8".split(),
            "model",
            ModelOptions(
                attention="neighbor", sparse_pairs="hybrid", n_neighbors=16, pair_features="factorized", rank=8
            ),
        ),
        (
            "--residual hyper --n-streams 2 --layer-sharing block --sharing-block 2 --bottleneck 4 --rank auto".split(),
            "model",
            ModelOptions(residual="hyper", n_streams=2, layer_sharing="block", sharing_block=2, bottleneck=4),
        ),
        (
            ["--use-moe", "--num-experts", "8", "--moe-top-k=1", "--expert-width", "full"],
            "model",
            ModelOptions(use_moe=True, num_experts=8, moe_top_k=1, expert_width="full"),
        ),
        (["--no-moe"], "model", ModelOptions(use_moe=False)),
        (["--moe-load-balance-loss-weight", "0.1"], "plan", PlanOptions(moe_load_balance_loss_weight=0.1)),
        (
            ["--prediction-type", "x0", "--position-nu", "2"],
            "model",
            ModelOptions(prediction_type="x0", position_nu=2.0),
        ),
        (["--epochs", "3"], "training", TrainingOptions(max_epochs=3)),
        (["--max-epochs", "3"], "training", TrainingOptions(max_epochs=3)),
        (["--max-time", "90"], "training", TrainingOptions(max_time=90.0)),
        (["--max-time", "00:01:00:00"], "training", TrainingOptions(max_time="00:01:00:00")),
        (["--num-workers", "2"], "training", TrainingOptions(num_workers=2)),
        (["--devices", "2"], "training", TrainingOptions(devices=2)),
        (["--devices", "0,1"], "training", TrainingOptions(devices="0,1")),
        (["--gpus", "2"], "training", TrainingOptions(gpus=2)),
        (
            "--strategy fsdp2 --devices 4 --num-nodes 2 --context-parallel-size 4".split(),
            "training",
            TrainingOptions(strategy="fsdp2", devices=4, num_nodes=2, context_parallel_size=4),
        ),
        (["--gene-dropout", ".2", "--thinning", ".1"], "training", TrainingOptions(gene_dropout=0.2, thinning=0.1)),
        (["--lambda-neighbor", "0", "--lr", "1e-4"], "plan", PlanOptions(lambda_neighbor=0.0, lr=1e-4)),
        (["--enable-masking"], "model", ModelOptions(enable_masking=True)),
        (["--disable-masking"], "model", ModelOptions(enable_masking=False)),
        (
            ["--expression-mask-ratio", ".4", "--position-mask-ratio", "0.3", "--mask-strategy", "block"],
            "training",
            TrainingOptions(expression_mask_ratio=0.4, position_mask_ratio=0.3, mask_strategy="block"),
        ),
        (
            ["--masking-probability", "1", "--initial-mask-share", ".1", "--mask-ramp-steps", "500"],
            "training",
            TrainingOptions(masking_probability=1.0, initial_mask_share=0.1, mask_ramp_steps=500),
        ),
        (["--reconstruction-weight", "2"], "plan", PlanOptions(reconstruction_weight=2.0)),
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
    assert parsed["seed"] == 42
    assert parsed["plan"] == PlanOptions(lr=1e-4)
    assert parsed["model"] == ModelOptions(
        mode="joint", use_gated_attention=True, gate_type="elementwise", use_moe=True, num_experts=8, moe_top_k=2,
        enable_masking=True,
    )  # fmt: skip
    assert parsed["training"] == TrainingOptions(
        max_epochs=100, batch_size=64, gpus=2, num_workers=4, expression_mask_ratio=0.3, position_mask_ratio=0.33
    )
    off = parse(*train_tokens, "--no_gated_attention", "--no_moe", "--disable_masking")["model"]
    assert off.arguments() == ModelOptions(attention="linear").arguments()


def test_demo_keeps_its_defaults_beside_given_flags(tmp_path):
    arguments = parse("demo", "--output-dir", str(tmp_path), "--d-model", "32", "--epochs", "2")
    assert arguments["model"] == DemoModelOptions(d_model=32)
    assert arguments["training"] == DemoTrainingOptions(max_epochs=2)


def test_aliases_become_arguments():
    assert ModelOptions(use_gated_attention=False).arguments()["attention"] == "linear"
    arguments = TrainingOptions(gpus=2, devices="auto").arguments(StandIn())
    assert (arguments["accelerator"], arguments["devices"]) == ("gpu", 2)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--attention", "full", "--no-use-gated-attention"], "--attention full and --no-use-gated-attention"),
        (["--attention", "linear", "--use-gated-attention"], "--attention linear and --use-gated-attention"),
        (["--attention", "geometric", "--no-use-gated-attention"], "--attention geometric and --no-use-gated"),
        (["--n-neighbors", "8"], "--n-neighbors is for --attention neighbor; add that, or leave it out"),
        (["--rank", "8", "--attention", "geometric"], "--rank is for --pair-features factorized"),
        (["--gpus", "2", "--accelerator", "cpu"], "--gpus names accelerator and devices"),
        (["--gpus", "2", "--devices", "1"], "--gpus names accelerator and devices"),
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
    assert parse(*train_tokens, *tokens)["model"].arguments()["attention"] == attention


@pytest.mark.parametrize(
    "tokens",
    [
        ["--d-model", "0"], ["--epochs", "0"], ["--mode", "both"], ["--dmodel", "8"], ["--dropout", "3"], ["--lr", "-1"],
        ["--lr", "nan"], ["--ema_decay", "3"], ["--gradient_clip_val", "-1"], ["--warmup_steps", "-5"],
        ["--num_workers", "-1"], ["--expression-mask-ratio", "1.5"], ["--validation-size", "1"], ["--weight-decay", "-1"],
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
