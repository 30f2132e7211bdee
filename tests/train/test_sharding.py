"""Weights in shards, in a group of one process: what is spread, averaged, and brought together again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.train import MovingAverage
from alphastomics.train.distributed.sharding import (
    copy_full_params,
    distribute_like,
    full_tensor,
    full_weights,
    local_params,
    shard,
    to_local,
    touch_all_params,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*returned a view tensor")  # which nothing writes into


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def network(**kwargs) -> Denoiser:
    torch.manual_seed(0)
    size = {"n_genes": 6, "n_dims": 2, "d_model": 16, "n_layers": 2, "n_heads": 2, "n_latent": 4}
    return Denoiser(DenoiserConfig(**size, **kwargs))


def inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(2, 7, 6), torch.randn(2, 7, 2), torch.full((2,), 0.5), torch.full((2,), 0.5)


def test_a_sharded_copy_has_the_same_predictions(mesh):
    module = network()
    copy = shard(module, mesh)
    assert all(isinstance(p, DTensor) for p in copy.parameters())
    assert not any(isinstance(p, DTensor) for p in module.parameters())
    torch.testing.assert_close(copy(*inputs()).position, module(*inputs()).position)


@pytest.mark.parametrize("sharing", ["none", "universal"])
def test_every_parameter_has_the_gradient_of_the_whole_network_or_0(mesh, sharing):
    module = network(layer_sharing=sharing)
    copy = shard(module, mesh)
    touch_all_params(copy(*inputs()).position.square().sum(), copy.parameters()).backward()
    module(*inputs()).position.square().sum().backward()
    local_params(copy)
    idle = 0
    for mine, part in zip(module.parameters(), copy.parameters(), strict=True):
        expected = torch.zeros_like(mine) if mine.grad is None else mine.grad
        idle += mine.grad is None
        torch.testing.assert_close(full_tensor(part.grad), expected)
    assert idle > 0


def test_weights_are_gathered_on_access(mesh):
    copy = shard(network(), mesh)
    copy(*inputs())
    with full_weights(copy.blocks):
        assert not any(isinstance(p, DTensor) for p in copy.blocks[0].parameters())
    assert all(isinstance(p, DTensor) for p in copy.blocks[0].parameters())


class Plan(torch.nn.Module):
    def __init__(self, module: Denoiser) -> None:
        super().__init__()
        self.module = module


class Trainer:
    global_step = 0


def test_the_average_is_sharded_and_gathered_at_the_end(mesh):
    module = network()
    before = [p.detach().clone() for p in module.parameters()]
    plan, trainer, ema = Plan(shard(module, mesh)), Trainer(), MovingAverage(0.5)
    ema.on_fit_start(trainer, plan)
    with torch.no_grad():
        for value in to_local(local_params(plan)):
            value.add_(1.0)
    trainer.global_step = 1
    ema.on_train_batch_end(trainer, plan, None, None, 0)
    decay = min(0.5, 1 / 10)
    expected = [old + (1 - decay) for old in before]
    state = ema.state_dict()
    for average, value in zip(state["average"], expected, strict=True):
        assert not isinstance(average, DTensor)
        torch.testing.assert_close(average, value)
    plan.module(*inputs())  # leaves the weights of heads whole, as a validation does
    ema.finish(plan)
    copy_full_params(plan.module, module)
    for mine, value in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(mine.detach(), value)


def test_a_loaded_average_is_sharded_as_the_weights(mesh):
    plan, ema = Plan(shard(network(), mesh)), MovingAverage(0.5)
    values = [torch.full(p.shape, 3.0) for p in plan.parameters()]
    ema.on_fit_start(Trainer(), plan)
    ema.load_state_dict({"average": values, "n_updates": 4})
    ema.on_train_start(Trainer(), plan)
    assert all(isinstance(average, DTensor) for average in ema.average)
    ema.swap(plan)
    assert all(bool((full_tensor(value) == 3.0).all()) for value in local_params(plan))


def test_unsharded_modules_are_unchanged():
    value = torch.ones(3)
    assert distribute_like(value, torch.zeros(3)) is value
    assert full_tensor(value) is value
    assert to_local([value]) == [value]
