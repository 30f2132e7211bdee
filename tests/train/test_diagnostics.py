"""Statistics of the layers against the layers themselves."""

from __future__ import annotations

import pytest
import torch

from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.nn.diagnostics import watch_layers
from alphastomics.train.defaults import advised_experts
from alphastomics.train.diagnostics import layer_statistics


@pytest.fixture
def run():
    """A network with experts, its statistics over two contexts of which one is padded, and what its layers saw."""

    def make(**config):
        torch.manual_seed(0)
        network = Denoiser(DenoiserConfig(n_genes=5, n_dims=2, d_model=16, n_layers=2, n_heads=2, **config)).eval()
        mask = torch.arange(12) < torch.tensor([12, 7])[:, None]
        inputs = torch.randn(2, 12, 5), torch.randn(2, 12, 2), torch.zeros(2), torch.full((2,), 0.5)
        with watch_layers(network) as seen:
            network(*inputs, mask)
        return network, layer_statistics(seen, mask, mask.sum(1).tolist()), seen, mask

    return make


@pytest.mark.parametrize("gate_type", ["headwise", "elementwise"])
def test_gates_of_real_cells(run, gate_type):
    _, values, seen, mask = run(gate_type=gate_type)
    for i in range(2):
        gates = seen[i].attention.gates(seen[i].x)[mask].detach()
        torch.testing.assert_close(values[f"train_layer_{i}_gate_mean"], gates.mean())
        torch.testing.assert_close(values[f"train_layer_{i}_gate_sd"], gates.std(correction=0))


@pytest.mark.parametrize("attention", ["full", "linear"])
def test_sink_is_the_largest_mean_attention(run, attention):
    _, values, seen, _ = run(attention=attention)
    weights = seen[1].attention.weights(seen[1].x[:1], torch.arange(12))[0]
    torch.testing.assert_close(values["train_layer_1_sink"], weights.mean(1).max().detach())
    assert ("train_layer_0_gate_mean" in values) == (attention == "full")


def test_usage_of_real_cells(run):
    _, values, seen, mask = run(use_moe=True)
    for i in range(2):
        assigned = seen[i].routing.assigned[mask]
        for expert in range(4):
            expected = assigned[:, expert].sum() / assigned.sum()
            torch.testing.assert_close(values[f"train_layer_{i}_expert_usage_{expert}"], expected)
    assert not any(x.requires_grad for layer in seen.values() for x in (layer.x, *layer.routing))


def test_padding_alone_gives_no_statistics(run):
    _, _, seen, mask = run(use_moe=True)
    values = layer_statistics(seen, torch.zeros_like(mask), [0, 0])
    assert all(float(value) == 0 for value in values.values())


def test_hooks_are_removed_afterwards(run):
    network, _, seen, mask = run(use_moe=True)
    before = dict(seen)
    network(torch.randn(2, 12, 5), torch.randn(2, 12, 2), torch.zeros(2), torch.zeros(2), mask)
    assert seen == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


@pytest.mark.parametrize(
    ("n_cells", "num_experts", "moe_top_k"), [(9_999, 4, 1), (10_000, 8, 2), (100_000, 8, 2), (100_001, 16, 2)]
)
def test_advice_by_the_number_of_cells(n_cells, num_experts, moe_top_k):
    assert advised_experts(n_cells) == {"num_experts": num_experts, "moe_top_k": moe_top_k}
