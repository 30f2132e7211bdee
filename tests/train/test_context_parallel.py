"""Cells of one context over several processes in training: groups of processes, errors, and equal gradients.

The slow tests run ``strategy_program.py``, as those of strategies do. ``tests/nn/test_split_denoiser.py`` shows that the network is
the same to rounding.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from alphastomics.nn import DenoiserConfig
from alphastomics.nn.parallel import SINGLE_PROCESS
from alphastomics.train import ContextDataModule, resolve_strategy
from alphastomics.train.distributed import strategies
from alphastomics.train.distributed.processes import check_group_size, group_index, join_group
from alphastomics.train.memory.estimate import estimate_training

if TYPE_CHECKING:
    from pathlib import Path

MODELS: dict[str, dict[str, Any]] = {
    "moe": {"use_moe": True, "moe_top_k": 1},
    "full": {"enable_masking": True},
    "linear": {"attention": "linear", "layer_sharing": "universal"},
    "geometric": {"attention": "geometric", "pair_features": "factorized"},
    "neighbor": {"attention": "neighbor", "n_neighbors": 4, "residual": "hyper"},
    "axial": {"attention": "axial", "bottleneck": 2},
}
MODELS = {name: {"dropout": 0.1} | arguments for name, arguments in MODELS.items()}
ODD = {"context_size": 45, "batch_size": 90}  # contexts of 45, 35 and 20 cells, two of them in a batch
NO_GRADIENT = "position_out.bias"  # positions are centered: what moves it is rounding, which Adam makes a step
KEYS = slice(16, 32)  # likewise the biases of keys of linear attention, which cancel in its softmax over cells


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 3)), (1, (0, 3)), (2, (1, 3)), (5, (2, 3))])
def test_consecutive_processes_share_contexts(rank, expected):
    assert group_index(SimpleNamespace(global_rank=rank, world_size=6), 2) == expected
    assert group_index(None, 2) == (0, 1)


def test_a_group_of_one_is_alone():
    assert join_group(SimpleNamespace(global_rank=1, world_size=3), 1) is SINGLE_PROCESS


def test_groups_read_contexts_as_processes_would(source):
    """Processes 2 and 3 of four, in groups of two, have what process 1 of two has."""

    def rows(rank: int, world_size: int, size: int) -> list[list[int]]:
        data = ContextDataModule(source, batch_size=40, context_size=40, group_size=size)
        data.trainer = SimpleNamespace(global_rank=rank, world_size=world_size)
        return [raw.batch.rows.tolist() for raw in data.train_dataloader()]

    assert rows(2, 4, 2) == rows(3, 4, 2) == rows(1, 2, 1) != rows(0, 4, 2)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_the_number_of_processes_must_be_a_multiple_of_the_group():
    check_group_size(2, 4)
    with pytest.raises(ValueError, match="context_parallel_size=3"):
        check_group_size(3, 4)
    with pytest.raises(ValueError, match="context_parallel_size=0"):
        check_group_size(0, 4)
    with pytest.raises(ValueError, match="context_parallel_size=2.* 3 processes"):
        join_group(SimpleNamespace(global_rank=0, world_size=3), 2)


def test_invalid_groups_raise_before_training():
    with pytest.raises(ValueError, match="context_parallel_size=2.* 1 process.*devices="):
        resolve_strategy("auto", accelerator="cpu", group_size=2)
    with pytest.raises(ValueError, match="3 processes"):
        resolve_strategy("ddp_fork", accelerator="cpu", devices=3, group_size=2)
    assert resolve_strategy("ddp_fork", accelerator="cpu", devices=1, num_nodes=2, group_size=2) is not None


def test_deepspeed_raises(monkeypatch):
    monkeypatch.setattr(strategies, "_can_start_again", lambda: True)
    monkeypatch.setattr(strategies, "_check_device", lambda *_: None)
    with pytest.raises(ValueError, match="strategy='ddp'"):
        resolve_strategy("deepspeed_stage_1", accelerator="cpu", devices=2, group_size=2)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "full" else pytest.mark.slow) for kind in MODELS if kind != "moe"]
)
def test_the_estimate_of_blocks_falls_with_the_processes(kind):
    def peak(n_layers: int, size: int) -> int:
        config = DenoiserConfig(n_genes=10, n_dims=2, n_layers=n_layers, attention=kind, n_heads=4)
        return estimate_training(config, n_cells=2048, group_size=size).activations

    whole, quarter = (peak(3, size) - peak(2, size) for size in (1, 4))
    assert quarter < 0.42 * whole


# -- all learn the same ------------------------------------------------------------------------------------------------


def assert_same(folder: Path, ranks: list[Any], reference: Path, alone: Any, *, n_steps: int) -> None:
    for rank in ranks:
        for name, found in rank.items():
            expected = alone[name]
            assert len(found["losses"]) == found["n_steps"] == expected["n_steps"] == n_steps
            np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-5, rtol=1e-6, err_msg=name)
            assert found["history"].keys() == expected["history"].keys()
            for key, values in expected["history"].items():
                np.testing.assert_allclose(found["history"][key], values, rtol=1e-4, atol=1e-5, err_msg=f"{name} {key}")
            assert found["same"]
            assert found["plain"] == ["Parameter"]
            weights, wanted = (load_file(where / name / "model.safetensors") for where in (folder, reference))
            if name == "linear":
                for key in [key for key in wanted if key.endswith("attention.qkv.bias")]:
                    weights[key], wanted[key] = (np.delete(each[key], KEYS) for each in (weights, wanted))
            for key in wanted.keys() - {NO_GRADIENT}:
                np.testing.assert_allclose(weights[key], wanted[key], atol=1e-5, err_msg=f"{name} {key}")
    assert all(rank == ranks[0] for rank in ranks)


@pytest.fixture(scope="module")
def alone(run_strategy, tmp_path_factory) -> tuple[Path, Any]:
    """One process with the same batches, and where its models are."""
    folder = tmp_path_factory.mktemp("alone") / "auto"
    return folder, run_strategy(folder, "auto", devices=1, models=MODELS, **ODD)[0]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_with_half_of_the_cells_match_one(run_strategy, alone, tmp_path, strategy):
    """Losses and statistics of every step, the last of an epoch with one context; weights, and what is sampled from a file."""
    models = {kind: MODELS[kind] for kind in (MODELS if strategy == "ddp" else ("moe", "geometric"))}
    ranks = run_strategy(tmp_path / strategy, strategy, models=models, context_parallel_size=2, **ODD)
    assert len(ranks) == 2
    assert_same(tmp_path / strategy, ranks, *alone, n_steps=9)


@pytest.mark.slow
def test_two_groups_of_two_match_one_process_that_accumulates(run_strategy, tmp_path):
    models, common = (
        {kind: MODELS[kind] for kind in ("moe", "full")},
        {**ODD, "recompute": "all", "validation_size": 0.3},
    )
    (expected,) = run_strategy(tmp_path / "alone", "auto", devices=1, accumulation=2, models=models, **common)
    ranks = run_strategy(tmp_path / "four", "ddp_fork", devices=4, models=models, context_parallel_size=2, **common)
    assert "validation_loss" in expected["moe"]["history"]
    assert_same(tmp_path / "four", ranks, tmp_path / "alone", expected, n_steps=3)
