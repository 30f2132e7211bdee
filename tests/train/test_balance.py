"""The use of experts, from step to step."""

from __future__ import annotations

import torch

from alphastomics.nn import DenoiserConfig
from alphastomics.train.expert_load import ExpertLoad

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
