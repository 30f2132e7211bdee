"""What every network on factors keeps to, and that the stack uses its ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings, strategies as st

from alphastomics.nn.pair import (
    AxialAttention,
    FactorCrossAttention,
    PairFactors,
    PairLayer,
    PairStack,
    PairTransition,
    TriangleAttention,
    TriangleMultiplication,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

ATTENTIONS = (None, "triangle", "axial", "cross")
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "outgoing": lambda: TriangleMultiplication(8, "outgoing"),
    "incoming": lambda: TriangleMultiplication(8, "incoming"),
    "starting": lambda: TriangleAttention(8, 2, "starting"),
    "ending": lambda: TriangleAttention(8, 2, "ending"),
    "axial": lambda: AxialAttention(8, 2),
    "cross": lambda: FactorCrossAttention(8, 2, 6),
    "transition": lambda: PairTransition(8),
    "mix": lambda: PairLayer(8, 6, attention="cross"),
    "tangent": lambda: PairLayer(8, 6, attention="triangle", residual="tangent"),
    "distribute": lambda: PairLayer(8, 6, attention="axial", residual="distribute"),
}
networks = pytest.mark.parametrize("name", NETWORKS)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Triangle attention over some rows at a time."""
    monkeypatch.setattr("alphastomics.nn.pair.triangle.BLOCK", 5000)


def make(name: str, *, trained: bool = True) -> nn.Module:
    """A network whose parameters that start at zero are no longer so."""
    torch.manual_seed(0)
    network = NETWORKS[name]().double().eval()
    if trained:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    return network


def close(actual: PairFactors, expected: PairFactors) -> None:
    torch.testing.assert_close(actual.left, expected.left, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(actual.right, expected.right, atol=1e-9, rtol=1e-7)


@networks
def test_padding_changes_nothing_and_comes_out_as_zero(name, make_factors, mask):
    network, factors = make(name), make_factors(mask=mask)
    after = network(factors)
    assert not after.left[1][:, ~mask[1]].any()
    assert not after.right[1][:, ~mask[1]].any()
    for context, cells in enumerate(mask):
        alone = network(PairFactors(*(x[context : context + 1, :, cells] for x in factors[:2])))
        close(PairFactors(*(x[context : context + 1, :, cells] for x in after[:2])), alone)


@networks
def test_the_order_of_the_cells_carries_no_meaning(name, make_factors):
    network, factors = make(name), make_factors()
    order = torch.randperm(11)
    after, shuffled = network(factors), network(PairFactors(*(x[:, :, order] for x in factors[:2])))
    close(shuffled, PairFactors(*(x[:, :, order] for x in after[:2])))


@networks
def test_a_context_of_padding_alone_is_zero_with_a_finite_gradient(name, make_factors):
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1] = False
    left, right = (x.requires_grad_() for x in make_factors(mask=mask)[:2])
    network = make(name)
    after = network(PairFactors(left, right, mask))
    assert not after.left[1].any()
    (after.left.square().sum() + after.right.square().sum()).backward()
    for x in (left, right, *network.parameters()):
        assert bool(x.grad.isfinite().all())


@networks
def test_parameters_serve_any_rank(name, make_factors):
    network = make(name)
    for rank in (1, 2, 5, 6):
        assert network(make_factors(rank=rank)).rank == rank


@networks
def test_all_parameters_learn(name, make_factors):
    """Bar: no gradient is None in any step, all are non-zero within 20."""
    network, factors = make(name, trained=False).train(), make_factors(rank=6)
    goal = torch.randn(2, 11, 11, 8, dtype=torch.float64)
    optimizer, learnt = torch.optim.Adam(network.parameters(), 1e-2), set()
    for _ in range(20):
        optimizer.zero_grad()
        after = network(factors)
        (after.dense() - goal).square().mean().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())
        learnt |= {key for key, parameter in network.named_parameters() if parameter.grad.any()}
        optimizer.step()
        if len(learnt) == len(list(network.parameters())):
            break
    assert learnt == {key for key, _ in network.named_parameters()}


@networks
def test_networks_run_in_half_precision(name, make_factors):
    network = make(name).float()
    factors = PairFactors(*(x.float() for x in make_factors(n=30)[:2]))
    exact = network(factors).dense()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = network(factors)
        loss = rounded.left.square().mean() + rounded.right.square().mean()
    loss.backward()
    assert float((rounded.dense() - exact).detach().norm() / exact.detach().norm()) < 0.1


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("tangent", "distribute")])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), real=st.integers(1, 11))
def test_padding_values_change_nothing(name, seed, real):
    generator = torch.Generator().manual_seed(seed)
    left, right, noise = torch.randn(3, 1, 8, 11, 3, generator=generator, dtype=torch.float64)
    mask = torch.randperm(11, generator=generator)[None] < real
    network = make(name)
    filled = (x + 100 * noise * ~mask[:, None, :, None] for x in (left, right))
    close(network(PairFactors.masked(*filled, mask)), network(PairFactors.masked(left, right, mask)))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("residual", ["mix", "tangent"])
def test_at_first_a_stack_changes_nothing(residual, attention, make_factors):
    factors = make_factors()
    network = PairStack(8, 3, attention=attention, residual=residual).double()
    close(network(factors), factors)


def effective_rank(x: Tensor) -> float:
    """Exponential of the entropy of the normalized singular values of ``x`` (..., R)."""
    share = torch.linalg.svdvals(x.detach().flatten(0, -2))
    share = share / share.sum()
    return float((-(share.clamp_min(1e-300).log() * share).sum()).exp())


def same_ranks(x: Tensor) -> bool:
    """Whether two ranks of ``x`` (..., R) hold the same."""
    ranks = x.detach().flatten(0, -2).mT
    apart = torch.cdist(ranks, ranks) / ranks.norm() + torch.eye(len(ranks))
    return float(apart.min()) < 1e-6


@pytest.mark.parametrize("residual", ["mix", "tangent", "distribute"])
def test_all_ranks_are_used(residual, make_factors, monkeypatch):
    """Bar: effective rank of the update over 1.5, no two ranks equal after four layers; distribution fails both."""
    monkeypatch.setattr("alphastomics.nn.pair.stack.N_LAYERS", 4)
    torch.manual_seed(0)
    network, factors = PairStack(8, 6, residual=residual).double(), make_factors(rank=6)
    with torch.no_grad():
        for layer in network.layers:
            for part in layer.updates:  # the transition would hide what triangles do
                for parameter in part.parameters():
                    parameter += 0.3 * torch.randn_like(parameter)
    after = network(factors)
    for side, before in zip(after[:2], factors[:2], strict=True):
        update = side - before
        assert (effective_rank(update) > 1.5) == (residual != "distribute")
        assert same_ranks(update) == (residual == "distribute")
        assert not same_ranks(side)


def test_transition_is_a_network_over_channels(make_factors):
    module, factors = make("transition"), make_factors()
    after = module(factors)
    for side, new, mlp in zip(factors[:2], after[:2], (module.left, module.right), strict=True):
        x = side[1, :, 4, 2]
        torch.testing.assert_close(new[1, :, 4, 2], x + mlp(x))


def test_dropout_falls_on_rows_except_at_ending_nodes():
    layer = PairLayer(8, 4, attention="triangle", dropout=0.25)
    assert [(update.dropout.rate, update.dropout.shared_over) for update in layer.updates] == [
        (0.25, "row"),
        (0.25, "row"),
        (0.25, "row"),
        (0.25, "column"),
    ]


def test_dropout_is_drawn_in_training_only(make_factors):
    network, factors = PairLayer(8, 3, dropout=0.5).double(), make_factors()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert not torch.equal(network(factors).left, network(factors).left)
    network.eval()
    assert torch.equal(network(factors).left, network(factors).left)


def test_invalid_uses_raise(make_factors):
    with pytest.raises(ValueError, match="pair_attention='grid'"):
        PairStack(8, 4, attention="grid")
    with pytest.raises(ValueError, match="max_rank"):
        PairStack(8, 4).double()(make_factors(rank=5))


PEAK = """
import json, sys
import torch
from alphastomics.nn.pair import PairFactors, PairLayer, TriangleMultiplication
name, n = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
network = TriangleMultiplication(32, "outgoing") if name == "triangle" else PairLayer(32, 8)

def peak(n):
    factors = PairFactors(torch.randn(1, 32, n, 8, requires_grad=True), torch.randn(1, 32, n, 8, requires_grad=True))
    after = network(factors)
    (after.left.square().mean() + after.right.square().mean()).backward()
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(status["VmHWM"].split()[0])

start = peak(16)  # libraries and code that the first use loads
print(json.dumps(peak(n) - start))
"""


def additional_peak(name: str, n: int) -> int:
    """Largest resident memory in KiB of forward and backward over ``n`` cells, less that of the same process before."""
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK, name, str(n)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("name", ["triangle", "stack"])
def test_memory_is_linear_in_cells(name):
    """Bar: four times the cells take at most 4.3 times the memory, forward and backward, at R = 8 and C = 32."""
    small, large = additional_peak(name, 4096), additional_peak(name, 16384)
    assert small > 8_000  # factors alone are 8 MiB
    assert large <= 4.3 * small, (small, large)
