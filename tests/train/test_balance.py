"""The use of experts, from step to step."""

from __future__ import annotations

import pytest
import torch

from alphastomics.config import PlanConfig
from alphastomics.data import ContextDataset
from alphastomics.nn import Denoiser, DenoiserConfig, experts
from alphastomics.train.expert_load import ExpertLoad
from alphastomics.train.objective import Objective
from alphastomics.train.short_training import training_steps

CONFIG = DenoiserConfig(n_genes=5, n_dims=2, n_layers=2, use_moe=True, num_experts=4)


def test_use_is_even_before_the_first_step_and_then_that_of_all_batches_and_processes():
    load = ExpertLoad()
    load.begin(CONFIG, torch.device("cpu"))
    assert load.last.tolist() == [[1.0] * 4] * 2
    first, second = torch.arange(8.0).view(2, 4), torch.ones(2, 4)
    load.add(first)
    load.add(second)
    assert load.last.tolist() == [[1.0] * 4] * 2
    load.end_step(lambda counts: 2 * counts)
    assert torch.equal(load.last, 2 * (first + second))
    load.add(second)
    load.end_step(lambda counts: counts)
    assert torch.equal(load.last, second)


def test_a_checkpoint_keeps_the_use_of_experts():
    load = ExpertLoad()
    load.last = torch.arange(8.0).view(2, 4)
    load.begin(CONFIG, torch.device("cpu"))
    assert torch.equal(load.last, torch.arange(8.0).view(2, 4))


def test_without_experts_no_use_is_counted():
    load = ExpertLoad()
    load.begin(DenoiserConfig(n_genes=5, n_dims=2), torch.device("cpu"))
    load.end_step(lambda counts: counts)
    assert load.last is None


def test_a_training_in_one_process_uses_its_own_load(source, monkeypatch):
    monkeypatch.setattr(
        experts, "_sum_over_processes", lambda _: pytest.fail("the other processes would be waited for")
    )
    config = DenoiserConfig(n_genes=20, n_dims=2, d_model=16, n_heads=2, n_layers=2, use_moe=True, moe_top_k=1)
    objective = Objective(Denoiser(config), PlanConfig(), mode="expr_to_pos")
    contexts = ContextDataset(source, context_size=100, seed=0)
    steps = training_steps(objective, [contexts], PlanConfig(), n_contexts=3, rate_factor=lambda _: 1.0)
    for _ in range(2):
        next(steps)
        assert objective.load.last.sum(dim=1).tolist() == [source.n_cells] * config.n_layers
