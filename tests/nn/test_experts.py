"""Experts against a loop over cells in float64, their arithmetic, and what must hold of any routing."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

from alphastomics.nn import (
    DenoiserConfig,
    Experts,
    Routing,
    balance_losses,
    count_parameters,
    expert_usage,
    experts as grouped,
)
from alphastomics.nn.block import Block

D, D_FF = 8, 12


def experts(num_experts: int = 4, top_k: int = 2, width: str = "split", *, seed: int = 0) -> Experts:
    torch.manual_seed(seed)
    module = Experts(D, D_FF, num_experts=num_experts, top_k=top_k, width=width).double().eval()
    torch.nn.init.normal_(module.router.weight)
    torch.nn.init.normal_(module.noise.weight)
    return module


def cells(b: int = 2, n: int = 9, *, seed: int = 3) -> torch.Tensor:
    return torch.randn(b, n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=["even", "as counted"])
def layout(request, monkeypatch):
    """Both ways to run the experts, whatever their sizes."""
    monkeypatch.setattr(grouped, "CPU_LAUNCH_COST", 10**12 if request.param == "even" else 0)


def gelu(x: np.ndarray) -> np.ndarray:
    return torch.nn.functional.gelu(torch.from_numpy(x)).numpy()


def dense(module: Experts, x: np.ndarray) -> np.ndarray:
    """One cell (D,): the definition."""
    w1, b1, w2, b2 = (p.detach().numpy() for p in (module.weight_1, module.bias_1, module.weight_2, module.bias_2))
    p = softmax(module.router.weight.detach().numpy() @ x)
    chosen = np.argsort(-p)[: module.top_k]
    weight = p[chosen] if module.top_k == 1 else p[chosen] / p[chosen].sum()
    return sum(w * (gelu(x @ w1[e] + b1[e]) @ w2[e] + b2[e]) for w, e in zip(weight, chosen, strict=True))


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("width", ["split", "full"])
def test_experts_match_the_formula(top_k, width):
    module, x = experts(top_k=top_k, width=width), cells()
    y, routing = module(x)
    for actual, cell in zip(y.detach().view(-1, D), x.view(-1, D), strict=True):
        np.testing.assert_allclose(actual, dense(module, cell.numpy()), atol=1e-12)
    expected = np.exp(log_softmax(x.numpy() @ module.router.weight.detach().numpy().T, axis=-1))
    np.testing.assert_allclose(routing.probability.detach(), expected, atol=1e-12)
    assert bool((routing.assigned.sum(-1) == top_k).all())
    assert bool(
        (routing.probability.masked_fill(routing.assigned > 0, 0).amax(-1) < routing.probability.amax(-1)).all()
    )


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_parameters_of_the_example():
    dense_ffn = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))
    module = Experts(128, 256, num_experts=4, top_k=2, width="split")
    assert count_parameters(dense_ffn) == (65_920, 65_920)
    assert sum(p.numel() for p in (module.weight_1, module.bias_1, module.weight_2, module.bias_2)) == 66_304
    assert module.router.weight.numel() == module.noise.weight.numel() == 512
    assert count_parameters(module) == (67_328, 34_176)


def test_full_experts_are_as_wide_as_the_dense_network():
    module = Experts(128, 256, num_experts=4, top_k=1, width="full")
    assert count_parameters(module) == (4 * 65_920 + 1_024, 65_920 + 1_024)


# -- routing -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("top_k", [1, 2])
def test_padding_changes_nothing(top_k):
    module, x = experts(top_k=top_k), cells()
    expected, _ = module(x)
    padded = torch.cat([torch.full((2, 3, D), 1e3, dtype=torch.float64), x], dim=1)
    mask = (torch.arange(12) >= 3).expand(2, 12)
    y, routing = module(padded, mask)
    torch.testing.assert_close(y[:, 3:], expected)
    for value in (y, *routing):
        assert not bool(value[:, :3].any())
    y, _ = module.train()(padded, mask)
    torch.manual_seed(5)
    alone, _ = module(x)
    torch.manual_seed(5)
    torch.testing.assert_close(module(padded, mask)[0][:, 3:], alone)  # also the noise is that of the real cells


def test_order_of_the_cells_carries_no_meaning():
    module, x, order = experts(), cells(), torch.randperm(9)
    torch.testing.assert_close(module(x[:, order])[0], module(x)[0][:, order])


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("top_k", [1, 2])
def test_all_cells_to_the_same_experts(top_k):
    module, x = experts(num_experts=6, top_k=top_k), cells()
    with torch.no_grad():
        module.router.weight[:] = 0
        module.router.weight[:, 0] = torch.tensor([0.0, 0, 9, 0, 7, 0])
    x[..., 0] = 1
    y, routing = module(x)
    assert routing.assigned.sum((0, 1)).tolist() == [0, 0, 18, 0, 18 * (top_k - 1), 0]
    for actual, cell in zip(y.detach().view(-1, D), x.view(-1, D), strict=True):
        np.testing.assert_allclose(actual, dense(module, cell.numpy()), atol=1e-12)
    y.square().sum().backward()
    idle = module.weight_1.grad[0]  # a process that waits for this gradient gets zeros
    assert idle.shape == (D, 2)
    assert not bool(idle.any())
    assert bool(module.weight_1.grad[2].any())


@pytest.mark.usefixtures("layout")
def test_no_cells_at_all():
    module, x = experts(), cells()
    y, routing = module(x, torch.zeros(2, 9, dtype=torch.bool))
    y.sum().backward()
    balance = balance_losses([routing], torch.zeros(2, 9, dtype=torch.bool))
    assert not bool(y.any())
    assert balance.tolist() == [0, 0]
    assert all(p.grad is not None and not bool(p.grad.any()) for n, p in module.named_parameters() if "noise" not in n)


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_router_learns_from_the_task(top_k):
    module = experts(top_k=top_k)
    module(cells())[0].square().sum().backward()
    assert bool((module.router.weight.grad.abs().sum(1) > 0).all())
    assert torch.autograd.gradcheck(lambda x: module(x)[0], cells(1, 4).requires_grad_())


def test_noise_acts_in_training_alone():
    module, x = experts(), cells()
    assert torch.equal(module(x)[0], module(x)[0])
    module.train()
    torch.manual_seed(0)
    first, second = (module(x)[1].probability for _ in range(2))
    assert not torch.allclose(first, second)
    torch.manual_seed(0)
    assert torch.equal(module(x)[1].probability, first)
    torch.manual_seed(0)
    scores = x.view(-1, D) @ module.router.weight.T
    spread = torch.nn.functional.softplus(x.view(-1, D) @ module.noise.weight.T)
    expected = (scores + torch.randn_like(scores) * spread).softmax(-1)
    torch.testing.assert_close(first.view(-1, 4), expected)


def test_noise_projection_learns():
    module = experts().train()
    module(cells())[0].square().sum().backward()
    assert bool(module.noise.weight.grad.any())


def test_routing_is_settled_in_32_bits():
    module = Experts(D, D_FF, num_experts=4, top_k=2).eval()
    x = cells().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = module(x)
    assert routing.probability.dtype == torch.float32
    assert torch.equal(routing.probability, module(x)[1].probability)
    torch.testing.assert_close(y.float(), module(x)[0], atol=2e-2, rtol=2e-2)


# -- balance -----------------------------------------------------------------------------------------------------------


def balance(probability: torch.Tensor, assigned: torch.Tensor, mask: torch.Tensor) -> list[float]:
    """E sum f P of each context: f over the real cells of all contexts, P over its own."""
    a = assigned[mask].sum(0) / assigned[mask].sum()
    return [float(len(a) * (a * p[real].mean(0)).sum()) for p, real in zip(probability, mask, strict=True)]


def test_balance_is_1_when_balanced():
    mask = torch.ones(1, 8, dtype=torch.bool)
    even = torch.nn.functional.one_hot(torch.arange(8) % 4, 4)[None].double()
    assert balance_losses([Routing(even, even)], mask).tolist() == [1]
    one = torch.nn.functional.one_hot(torch.zeros(8, dtype=torch.int64), 4)[None].double()
    assert balance_losses([Routing(one, one)], mask).tolist() == [4]
    assert balance_losses([Routing(even, even), Routing(one, one)], mask).tolist() == [2.5]


def test_balance_counts_real_cells_of_contexts_of_any_size():
    module, x = experts(), cells(b=4)
    _, routing = module(x)
    mask = torch.arange(9) < torch.tensor([9, 5, 2, 0])[:, None]
    losses = balance_losses([routing], mask).detach()
    assert losses.shape == (4,)
    assert losses[3] == 0
    expected = balance(*(part.detach()[:3] for part in routing), mask[:3])
    np.testing.assert_allclose(losses[:3], expected, rtol=1e-12)
    np.testing.assert_allclose(expert_usage(routing, mask), routing.assigned[mask].sum(0) / (2 * 16))


def test_balance_takes_the_use_of_another_step():
    module, x = experts(), cells(b=2)
    _, routing = module(x)
    mask = torch.arange(9) < torch.tensor([9, 4])[:, None]
    counts = torch.tensor([[5.0, 1.0, 2.0, 0.0]])
    found = balance_losses([routing], mask, counts)
    p = routing.probability.detach()
    for i, loss in enumerate(found.tolist()):
        assert loss == pytest.approx(float(4 * (counts[0] / 8 * p[i][mask[i]].mean(0)).sum()))


def test_balance_moves_the_router_and_evens_the_use():
    module, x = experts(top_k=1), cells(n=200)
    mask = torch.ones(2, 200, dtype=torch.bool)
    optimizer = torch.optim.SGD(module.router.parameters(), lr=1.0)
    uses = []
    for _ in range(100):
        _, routing = module(x)
        loss = balance_losses([routing], mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        uses.append(float(expert_usage(routing, mask).max()))
    assert min(uses[-10:]) < uses[0]
    assert float(loss.detach()) < 1.1


TWO_PROCESSES = """
import os, sys, torch
from alphastomics.nn import Routing, balance_losses
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
g = torch.Generator().manual_seed(0)
p = torch.rand(3, 5, 4, generator=g, dtype=torch.float64)
a = torch.nn.functional.one_hot(torch.randint(4, (3, 5), generator=g), 4).double()
mask = torch.arange(5) < torch.tensor([5, 2, 4])[:, None]
mine = slice(0, 1) if rank == 0 else slice(1, 3)
losses = balance_losses([Routing(p[mine], a[mine])], mask[mine])
total = losses.sum()
torch.distributed.all_reduce(total)
per_context = torch.stack([each[real].mean(0) for each, real in zip(p, mask)]).mean(0)
a = a[mask]
assert abs(float(total) / 3 - float(4 * (a.mean(0) * per_context).sum())) < 1e-12
torch.distributed.barrier()  # a process that leaves first breaks the connections of the other
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_balance_is_computed_over_all_processes(tmp_path):
    commands = [[sys.executable, "-c", TWO_PROCESSES, str(rank), str(tmp_path / "meet")] for rank in range(2)]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]


# -- in a block --------------------------------------------------------------------------------------------------------


def test_a_block_appends_the_routing_of_its_cells():
    config = {
        "n_genes": 1,
        "n_dims": 2,
        "d_model": 8,
        "n_heads": 2,
        "gate_type": "none",
        "use_moe": True,
        "moe_top_k": 1,
    }
    block = Block(DenoiserConfig(**config))
    routings: list[Routing] = []
    block(cells().float(), torch.zeros(2, 8), routings=routings)
    assert [routing.assigned.shape for routing in routings] == [(2, 9, 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 5}, "moe_top_k=5"),
        ({"top_k": 0}, "moe_top_k=0"),
        ({"num_experts": 5}, "num_experts=5"),
        ({"width": "half"}, "expert_width=.half"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        Experts(D, D_FF, **({"num_experts": 4, "top_k": 2} | arguments))
