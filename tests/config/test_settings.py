"""Every declared setting reaches the command line, files and documentation, with a sentence and a default that it accepts."""

from __future__ import annotations

import re
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest

from alphastomics.cli._datasets import ClusterOptions, DatasetOptions, SliceOptions, UploadOptions
from alphastomics.cli._options import ComparisonOptions, FitOptions, SetupOptions
from alphastomics.cli._query import EmbeddingOptions, SampleOptions
from alphastomics.cli._run import RunOptions, SourceOptions
from alphastomics.config import (
    Augmentation,
    ClusterConfig,
    Config,
    EmbeddingConfig,
    MaskingConfig,
    NetworkConfig,
    PlanConfig,
    SamplingConfig,
    Stage1Options,
    Stage2Options,
    TrainingConfig,
    UploadConfig,
)
from alphastomics.config._comparison import ComparisonConfig
from alphastomics.config._sections import DECLARATIONS, SETTINGS, EarlierKeys
from alphastomics.config._setting import Setting, check, descriptions, settings_of
from alphastomics.main import app
from alphastomics.model import AlphaSTomics
from alphastomics.tl import compare

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
COMPARISON = settings_of(ComparisonConfig)
OPTIONS = {  # declarations that are not in configuration files, with the commands that have their flags
    SliceOptions: (Stage1Options, "preprocess", "stage1"),
    DatasetOptions: (Stage2Options, "preprocess", "stage2"),
    ClusterOptions: (ClusterConfig, "preprocess", "stage1", "stage2"),
    UploadOptions: (UploadConfig, "upload"),
}
NOT_IN_FILES = [ComparisonConfig, EmbeddingConfig, SamplingConfig, *(cls for cls, *_ in OPTIONS.values())]
EVERY = [pytest.param(entry, id=name) for name, entry in SETTINGS.items()]
EVERYWHERE = EVERY + [
    pytest.param(entry, id=f"{cls.__name__}.{name}") for cls in NOT_IN_FILES for name, entry in settings_of(cls).items()
]


def flags_of(command: str) -> dict[str, set[str]]:
    """Flags of a command by the name of the setting."""
    found = app[command].assemble_argument_collection(parse_docstring=True)
    return {argument.field_info.name: set(argument.names) for argument in found if argument.parse}


@pytest.fixture(scope="module")
def arguments() -> dict[str, set[str]]:
    return flags_of("train")


def has_flags(entry: Setting, arguments: dict[str, set[str]]) -> bool:
    """Whether a command has the flags of a setting, and none of a setting without flags."""
    if entry.details.file_only or entry.details.python_only:
        return entry.flag not in set().union(*arguments.values())
    return {entry.flag, *entry.details.flags, *(entry.details.off or ())} <= arguments[entry.name]


def test_a_name_is_declared_once():
    assert sum(len(settings_of(cls)) for cls in DECLARATIONS) == len(SETTINGS)


@pytest.mark.parametrize("entry", EVERYWHERE)
def test_a_setting_has_a_description(entry: Setting):
    assert re.fullmatch(r"\S.*[.…]", entry.text), entry.name


@pytest.mark.parametrize("entry", EVERYWHERE)
def test_a_setting_accepts_its_default(entry: Setting):
    assert entry.problem(entry.default) is None


@pytest.mark.parametrize("cls", [*DECLARATIONS, *NOT_IN_FILES])
def test_docstrings_list_the_settings_in_their_order(cls: type):
    assert list(descriptions(cls)) == [entry.name for entry in fields(cls)]
    if cls is not EarlierKeys:
        check(cls())


def test_settings_of_a_comparison_are_arguments_and_options():
    arguments, options = signature(compare).parameters, ComparisonOptions()
    assert {name: arguments[name].default for name in COMPARISON} == vars(ComparisonConfig())
    assert {name: getattr(options, name) for name in COMPARISON} == vars(ComparisonConfig())
    assert all(f"    {name}\n        {entry.text}\n" in compare.__doc__ for name, entry in COMPARISON.items())


@pytest.mark.parametrize("entry", EVERY)
def test_a_setting_reaches_the_command_line(entry: Setting, arguments: dict[str, set[str]]):
    assert has_flags(entry, arguments)


@pytest.mark.parametrize("options", OPTIONS)
def test_settings_of_datasets_reach_the_command_line(options: type):
    cls, *commands = OPTIONS[options]
    for command in commands:
        assert all(has_flags(entry, flags_of(command)) for entry in settings_of(cls).values())
    values = vars(options())
    assert {name: values[name] for name in settings_of(cls)} == vars(cls())


@pytest.mark.parametrize("entry", EVERY)
def test_a_setting_reaches_files(entry: Setting):
    keys = {each.key for each, _ in Config()._items()}
    assert (entry.key in keys) != entry.details.python_only


def test_the_documentation_has_a_table_for_every_section():
    sections = {entry.key.rpartition(".")[0] for entry, _ in Config()._items()}
    assert set(re.findall(r"^\[settings: ([\w.]+)\]$", PAGE, flags=re.MULTILINE)) == sections


def test_options_of_the_command_line_have_the_declared_defaults():
    """All but the attention, which two flags set, and what follows from the data."""
    values = vars(FitOptions()) | vars(RunOptions()) | vars(SetupOptions()) | vars(SourceOptions())
    assert {values.pop(name) for name in ("attention", "resume")} == {None}
    assert not values.pop("overwrite")
    assert values == {name: None if SETTINGS[name].details.from_data else SETTINGS[name].default for name in values}


@pytest.mark.parametrize(
    ("command", "method", "entry"),
    [
        pytest.param(command, method, entry, id=f"{command}-{name}")
        for command, method, cls in (
            ("sample", AlphaSTomics.sample, SamplingConfig),
            ("extract", AlphaSTomics.get_latent_representation, EmbeddingConfig),
        )
        for name, entry in settings_of(cls).items()
    ],
)
def test_a_setting_of_a_trained_model_is_an_argument_in_python_and_a_flag(command, method, entry: Setting):
    declared = {entry.flag} if not entry.details.python_only else set()
    assert {name for name in flags_of(command).get(entry.name, ()) if not name.startswith("--no-")} == declared
    assert signature(method).parameters[entry.name].default == entry.default


def test_options_of_sampling_have_the_declared_defaults():
    assert vars(EmbeddingOptions()) == vars(EmbeddingConfig())
    assert vars(SampleOptions()) == vars(SamplingConfig())


@pytest.mark.parametrize(
    ("cls", "values", "name"),
    [
        (NetworkConfig, {"d_model": 0}, "d_model"),
        (NetworkConfig, {"d_model": 1.5}, "d_model"),
        (NetworkConfig, {"dropout": 1.0}, "dropout"),
        (NetworkConfig, {"dropout": float("nan")}, "dropout"),
        (NetworkConfig, {"attention": "fulll"}, "attention"),
        (NetworkConfig, {"rank": 33, "pair_features": "factorized"}, "rank"),
        (NetworkConfig, {"rank": 8}, "pair_features='factorized'"),
        (NetworkConfig, {"num_experts": 8}, "use_moe=True"),
        (NetworkConfig, {"n_neighbors": 8}, "attention='neighbor'"),
        (PlanConfig, {"lr": 0.0}, "lr"),
        (PlanConfig, {"lr": float("inf")}, "lr"),
        (PlanConfig, {"distance_clamp": 2.0}, "distance_loss='clamped' or 'huber'"),
        (PlanConfig, {"distance_loss": "huber", "distance_clamp": 0.0}, "distance_clamp"),
        (Augmentation, {"gene_dropout": 1.0}, "gene_dropout"),
        (Augmentation, {"gene_noise": -1.0}, "gene_noise"),
        (MaskingConfig, {"mask_strategy": "all"}, "mask_strategy"),
        (MaskingConfig, {"mask_ramp_steps": -1}, "mask_ramp_steps"),
        (TrainingConfig, {"validation_size": 1.0}, "validation_size"),
        (TrainingConfig, {"train_size": 0.9, "validation_size": 0.2}, "validation_size=0.2"),
        (TrainingConfig, {"recompute": "some"}, "recompute"),
        (TrainingConfig, {"recompute": -1}, "recompute"),
        (TrainingConfig, {"context_size": 0}, "context_size"),
        (ComparisonConfig, {"max_steps": 0}, "max_steps"),
        *((Stage1Options, {"z_spacing": wrong}, "z_spacing") for wrong in (-1.0, float("nan"), float("inf"))),
        (Stage1Options, {"z_spacing": 3.0, "position_is_3d": True}, "position_is_3d"),
        (Stage1Options, {"genes": ()}, "genes"),
        (Stage2Options, {"split": "cells"}, "split"),
        *((Stage2Options, {"train_ratio": wrong}, "train_ratio") for wrong in (0.0, 1.1)),
        (Stage2Options, {"val_ratio": -0.1}, "val_ratio"),
        (Stage2Options, {"train_ratio": 0.9, "val_ratio": 0.2}, "val_ratio"),
        (Stage2Options, {"max_shard_size": 0}, "max_shard_size"),
        (Stage2Options, {"scale_per_slice": True, "scale": False}, "scale=True"),
        (ClusterConfig, {"workers": 0}, "workers"),
        (ClusterConfig, {"scheduler": "tcp://10.0.0.1:8786", "workers": 2}, "scheduler"),
        (SamplingConfig, {"mode": "any"}, "mode='any'"),
        (SamplingConfig, {"mode": "joint"}, "n_cells"),
        (SamplingConfig, {"mode": "joint", "n_cells": 0}, "n_cells"),
        (SamplingConfig, {"n_cells": 5}, "mode='joint'"),
        (SamplingConfig, {"mode": "joint", "n_cells": 5, "inpaint": True}, "inpaint"),
        (SamplingConfig, {"mode": "joint", "n_cells": 5, "n_samples": 2, "reduce": "mean"}, "reduce='mean'"),
        (SamplingConfig, {"mode": "pos_to_expr", "refine": True}, "mode='expr_to_pos'"),
        (SamplingConfig, {"n_steps": 3}, "mode='pos_to_expr' or 'joint'"),
        (SamplingConfig, {"sampler": "ddpm"}, "mode='pos_to_expr' or 'joint'"),
        (SamplingConfig, {"n_samples": 0}, "n_samples"),
        (SamplingConfig, {"n_steps": 0}, "n_steps"),
        (SamplingConfig, {"reduce": "median"}, "reduce='median'"),
        (SamplingConfig, {"sampler": "euler"}, "sampler='euler'"),
        (SamplingConfig, {"sampler": "ddim", "eta": 1.5}, "eta=1.5"),
        (SamplingConfig, {"eta": 0.5}, "sampler='ddim'"),
        (SamplingConfig, {"mode": "pos_to_expr", "sampler": "ddpm", "eta": 0.5}, "sampler='ddim'"),
        (SamplingConfig, {"batch_size": 0}, "batch_size"),
    ],
)
def test_a_value_out_of_range_names_the_setting(cls: type, values: dict[str, object], name: str):
    with pytest.raises(ValueError, match=re.escape(name)):
        cls(**values)


def test_both_shares_of_the_slices_may_be_given():
    assert TrainingConfig(train_size=0.9, validation_size=0.1).train_size == 0.9
