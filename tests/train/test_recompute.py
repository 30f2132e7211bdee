"""Recomputed blocks against blocks that keep everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alphastomics.nn import Denoiser, DenoiserConfig, balance_losses
from alphastomics.nn.block import AdaptiveNorm
from alphastomics.train.memory.recompute import recompute

DEPTH = 4


def make_denoiser(**config: Any) -> Denoiser:
    torch.manual_seed(0)
    denoiser = Denoiser(
        DenoiserConfig(n_genes=7, n_dims=2, d_model=32, n_layers=DEPTH, n_heads=4, dropout=0.3, **config)
    )
    for part in denoiser.modules():
        if isinstance(part, AdaptiveNorm):
            nn.init.normal_(part.modulation.weight, std=0.2)
    return denoiser


def step(denoiser: Denoiser, k: int, *, precision: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and the gradient of every parameter, with some blocks recomputed."""
    torch.manual_seed(1)
    b, n = 2, 12
    mask = torch.arange(n) < torch.tensor([[n], [9]])
    inputs = torch.randn(b, n, 7), torch.randn(b, n, 2), torch.rand(b), torch.rand(b), mask
    routings: list[Any] = []
    denoiser.zero_grad()
    with recompute(denoiser.blocks, k), torch.autocast("cpu", torch.bfloat16, enabled=precision):
        output = denoiser(*inputs, routings=routings)
        loss = output.expression.float().square().mean() + output.position.float().square().mean()
        if routings:
            loss = loss + balance_losses(routings, mask).sum()
    loss.backward()
    assert len(routings) == (DEPTH if denoiser.config.use_moe else 0)
    return loss.detach(), {name: p.grad for name, p in denoiser.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("k", [1, 2, DEPTH])
@pytest.mark.parametrize("config", [{}, {"attention": "linear", "gate_type": "none"}, {"use_moe": True}])
def test_loss_and_gradients_are_those_without_recompute(k: int, config: dict[str, Any]) -> None:
    denoiser = make_denoiser(**config)
    loss, gradients = step(denoiser, 0)
    again, recomputed = step(denoiser, k)
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=0)
    assert recomputed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


def test_recompute_in_mixed_precision() -> None:
    denoiser = make_denoiser()
    loss, gradients = step(denoiser, 0, precision=True)
    again, recomputed = step(denoiser, DEPTH, precision=True)
    assert torch.equal(again, loss)
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in gradients.items())


def test_dropout_is_drawn_anew_by_every_step() -> None:
    denoiser = make_denoiser()
    with recompute(denoiser.blocks, DEPTH):
        x, clock = torch.randn(1, 5, 32), torch.randn(1, 32)
        assert not torch.equal(denoiser.blocks[0](x, clock), denoiser.blocks[0](x, clock))


def test_only_the_first_blocks_are_recomputed() -> None:
    denoiser = make_denoiser()
    x, clock = torch.randn(2, 12, 32, requires_grad=True), torch.randn(2, 32)

    def kept(block: nn.Module) -> int:
        """Numbers that are saved for backward, but parameters and inputs."""
        given = {p.data_ptr() for p in (x, clock, *denoiser.parameters())}
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(0 if tensor.data_ptr() in given else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, clock)
        return sum(sizes)

    everything = [kept(block) for block in denoiser.blocks]
    with recompute(denoiser.blocks, 2):
        assert [kept(block) for block in denoiser.blocks] == [0, 0, *everything[2:]]
    assert [kept(block) for block in denoiser.blocks] == everything
    assert min(everything) > 0


def test_the_network_is_as_before_when_the_context_closes() -> None:
    denoiser = make_denoiser()
    names = list(denoiser.state_dict())
    with recompute(denoiser.blocks, DEPTH):
        assert list(denoiser.state_dict()) == names
    with pytest.raises(ZeroDivisionError), recompute(denoiser.blocks, DEPTH):
        _ = 1 / 0
    assert all("forward" not in vars(block) for block in denoiser.blocks)


def test_a_block_of_several_depths_is_wrapped_once() -> None:
    calls: list[Tensor] = []

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return x.exp()

    block = Doubled()
    x = torch.zeros(3, requires_grad=True)
    with recompute([block, block], 2):
        block(block(x)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), torch.e))  # e^(e^x) e^x at 0
    assert len(calls) == 4


def test_without_gradient_nothing_runs_twice() -> None:
    denoiser = make_denoiser().eval()
    x, clock = torch.randn(1, 5, 32), torch.randn(1, 32)
    with torch.no_grad(), recompute(denoiser.blocks, DEPTH):
        assert denoiser.blocks[0](x, clock).grad_fn is None


def test_a_training_ends_with_the_same_weights(make_plan, fit) -> None:
    """The trainer as models use it, with dropout."""

    def trained(k: int) -> dict[str, Tensor]:
        plan = make_plan(dropout=0.2)
        torch.manual_seed(3)
        with recompute(plan.module.blocks, k):
            fit(plan)
        return plan.module.state_dict()

    usual, recomputed = trained(0), trained(2)
    assert all(torch.equal(recomputed[name], value) for name, value in usual.items())
