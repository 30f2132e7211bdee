"""Residual streams, shared weights and narrow feed-forward networks inside the denoiser."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from alphastomics.nn import Denoiser, DenoiserConfig, count_parameters
from alphastomics.nn.block import AdaptiveNorm
from alphastomics.nn.diagnostics import watch_layers

SIZES: dict[str, Any] = {"n_genes": 6, "n_dims": 2, "d_model": 16, "n_layers": 4, "n_heads": 2, "n_latent": 4}
RESIDUALS, SHARINGS, BOTTLENECKS = ("plain", "hyper"), ("none", "universal", "alternating", "block"), (None, 4)


def network(seed: int = 0, **options: Any) -> Denoiser:
    """A denoiser whose norms follow the timesteps."""
    torch.manual_seed(seed)
    denoiser = Denoiser(DenoiserConfig(**SIZES, **options))
    for part in denoiser.modules():
        if isinstance(part, AdaptiveNorm):
            torch.nn.init.normal_(part.modulation.weight, std=0.1)
    return denoiser


def run(denoiser: Denoiser, n: int = 9, padded: int = 0) -> torch.Tensor:
    """Both outputs for the same cells, with more or less padding behind them."""
    generator = torch.Generator().manual_seed(1)
    expression = torch.randn(2, n, 6, generator=generator)
    position = torch.randn(2, n, 2, generator=generator)
    pad = (0, 0, 0, padded)
    expression, position = (torch.nn.functional.pad(x, pad, value=7.0) for x in (expression, position))
    t = torch.tensor([0.3, 0.6])
    mask = (torch.arange(n + padded) < n).expand(2, -1) if padded else None
    output = denoiser(expression, position, t, t, mask)
    assert output.expression is not None
    assert output.position is not None
    return torch.cat([output.expression, output.position], dim=-1)[:, :n]


@pytest.mark.parametrize(
    ("residual", "sharing", "bottleneck"), list(itertools.product(RESIDUALS, SHARINGS, BOTTLENECKS))
)
def test_padding_changes_nothing_and_all_parameters_learn(residual, sharing, bottleneck):
    denoiser = network(residual=residual, layer_sharing=sharing, bottleneck=bottleneck)
    torch.testing.assert_close(run(denoiser, padded=3), run(denoiser), atol=1e-5, rtol=1e-4)
    optimizer = torch.optim.SGD(denoiser.blocks.parameters(), lr=0.1)
    touched = {name: torch.zeros(()) for name, _ in denoiser.blocks.named_parameters()}
    for _ in range(4):
        optimizer.zero_grad()
        run(denoiser).square().mean().backward()
        for name, parameter in denoiser.blocks.named_parameters():
            assert parameter.grad is not None, name
            touched[name] += parameter.grad.abs().sum()
        optimizer.step()
    # The key's bias shifts all scores of a query alike, and nothing else.
    assert [name for name, total in touched.items() if not total > 0] == []


@pytest.mark.parametrize("sharing", SHARINGS)
def test_a_state_is_loaded_by_a_network_of_the_same_kind(sharing):
    first, second = (network(seed, layer_sharing=sharing, residual="hyper") for seed in (0, 1))
    second.load_state_dict(first.state_dict())
    assert torch.equal(run(first), run(second))


def test_shared_weights_are_fewer_but_norms_are_not():
    n = {sharing: count_parameters(network(layer_sharing=sharing)).total for sharing in SHARINGS}
    assert n["universal"] == n["block"] < n["alternating"] < n["none"]  # four layers are one block
    denoiser = network(layer_sharing="universal")
    assert denoiser.blocks[0].attention is denoiser.blocks[3].attention
    assert denoiser.blocks[0].norm_1 is not denoiser.blocks[3].norm_1


def test_one_stream_more_or_less_starts_as_the_plain_network():
    plain, hyper = network(), network(residual="hyper")
    state = plain.state_dict()
    missing = hyper.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    torch.testing.assert_close(run(hyper), run(plain), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_layer_has_diagnostics_with_shared_weights(sharing):
    denoiser = network(layer_sharing=sharing, use_moe=True)
    with watch_layers(denoiser) as seen:
        run(denoiser)
    assert sorted(seen) == [0, 1, 2, 3]
    assert len({layer.x.double().sum().item() for layer in seen.values()}) == 4
    assert all(layer.routing is not None for layer in seen.values())


def test_experts_are_not_narrowed():
    with pytest.raises(ValueError, match="bottleneck=4"):
        network(use_moe=True, bottleneck=4)
