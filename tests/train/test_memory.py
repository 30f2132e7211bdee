"""Estimates of memory against what a process really takes, PyTorch's own tracker, and counting by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from alphastomics.diffusion import MaskingConfig
from alphastomics.nn import DenoiserConfig
from alphastomics.train.memory import estimate as memory
from alphastomics.train.memory.counter import StorageCounter, fake_tensors
from alphastomics.train.memory.estimate import (
    MemoryEstimate,
    Step,
    estimate_inference,
    estimate_step,
    estimate_training,
)
from alphastomics.train.memory.fit import MemoryFitter

DEPTH = 6
CONFIG = DenoiserConfig(n_genes=100, n_dims=2, n_layers=DEPTH)
SMALL = replace(CONFIG, n_layers=2)
TINY = 16  # cells of the step that is run first
MIB = 2**20

# Runs steps of the training plan as it is, of contexts whose keys give them absent positions, and prints by how much each
# raises the peak of the process above that of two tiny steps.
MEASURE = """
import json, sys
import numpy as np
import torch
from alphastomics.data import Batch
from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.train import TrainingPlan
from alphastomics.train.timesteps import Timesteps, draw_timesteps, keyed_rng, stratified_uniform
from alphastomics.train.memory.recompute import recompute

network, tiny, precision, steps = json.loads(sys.argv[1])
torch.set_num_threads(1)
config = DenoiserConfig(**network)
g, d = config.n_genes, config.n_dims
plan = TrainingPlan(Denoiser(config), mode="joint", modality_dropout=1.0)
weights = list(plan.parameters())
optimizer = torch.optim.AdamW(weights)
average = [weight.detach().clone() for weight in weights]

def places(i):
    key = np.array([0, 0, i])
    return draw_timesteps("joint", keyed_rng(key, 0), modality_dropout=1.0, kind=stratified_uniform(key, 0)) == Timesteps(0.0, 1.0)

key = torch.tensor([[0, 0, next(filter(places, range(1000)))]])

def step(n, k):
    batch = Batch(
        expression=torch.randn(1, n, g), position=torch.randn(1, n, d),
        mask=torch.ones(1, n, dtype=torch.bool), measured=torch.ones(1, g, dtype=torch.bool),
        present=torch.ones(1, g, dtype=torch.bool), dropout=torch.zeros(1), target=torch.randn(1, n, g),
        local_density=torch.zeros(1, n, config.n_ranks), sequence=torch.zeros(1, n, 0), center=torch.zeros(1, d), key=key,
        cell_type=torch.zeros(1, n, dtype=torch.int64),
        slice_index=torch.zeros(1, dtype=torch.int64), rows=torch.zeros(1, n, dtype=torch.int64),
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32"), recompute(plan.module.blocks, k):
        loss = plan.objective.total(plan.objective.losses(batch), batch)
    loss.backward()
    torch._foreach_lerp_(average, [weight.data for weight in weights], 0.1)
    optimizer.step()
    optimizer.zero_grad()

def peak():
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

for _ in range(2):
    step(tiny, 0)
baseline, found = peak(), []
for n, k in steps:
    step(n, k)
    found.append(peak() - baseline)
print(json.dumps(found))
"""


def measure(config: DenoiserConfig, steps: list[tuple[int, int]], precision: str = "32") -> list[int]:
    """Bytes of steps (cells, recomputed blocks) in a fresh process, each of which must take more than the one before."""
    names = ("n_genes", "n_dims", "n_layers", "attention", "gate_type", "pair_features")
    network = {name: getattr(config, name) for name in names}
    # Freed blocks go back to the system at once; without this the C library keeps up to twice of what is used.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, json.dumps([network, TINY, precision, steps])]
    result = subprocess.run(
        command, env=os.environ | allocator, capture_output=True, text=True, check=True, timeout=600
    )
    return json.loads(result.stdout)


def predict(config: DenoiserConfig, steps: list[tuple[int, int]], precision: str = "32") -> list[int]:
    def peak(n: int, k: int) -> int:
        return estimate_training(config, n_cells=n, n_recomputed=k, precision=precision, mode="joint").peak

    baseline = peak(TINY, 0)
    return [peak(n, k) - baseline for n, k in steps]


has_status = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not report peak memory")


def compare(config: DenoiserConfig, steps: list[tuple[int, int]], precision: str = "32") -> None:
    """Steps must be so long that buffers of kernels, up to 26 MB depending on the processor, are little."""
    for estimate, measured in zip(predict(config, steps, precision), measure(config, steps, precision), strict=True):
        assert abs(estimate / measured - 1) < 0.15


@has_status
@pytest.mark.slow
def test_three_estimates_are_within_15_percent_of_the_measurement() -> None:
    compare(CONFIG, [(8192, k) for k in (DEPTH, DEPTH // 2, 0)])


@has_status
@pytest.mark.slow
def test_an_estimate_in_bfloat16_is_within_15_percent_of_the_measurement() -> None:
    compare(CONFIG, [(8192, 0)], "bf16-mixed")


@has_status
@pytest.mark.slow
def test_a_step_of_four_times_as_many_cells_takes_four_times_the_memory() -> None:
    """All losses and the optimizer, in one context; attention is linear."""
    config = replace(CONFIG, n_layers=1, attention="linear", gate_type="none")
    short, long = measure(config, [(8192, 0), (32_768, 0)])
    assert long <= 4.3 * short


@has_status
@pytest.mark.slow
def test_a_network_for_long_contexts_takes_memory_for_its_cells_alone() -> None:
    """Bar 25: all blocks recomputed, 4 times the cells need 4.3 times the memory at most."""
    config = replace(SMALL, attention="neighbor", pair_features="factorized")
    short, long = measure(config, [(4096, 2), (16_384, 2)])
    assert long <= 4.3 * short


# -- counting --------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """Loss sum_i tanh(... tanh(w_i x_i)): w, x, their product and every tanh are n numbers each."""

    def __init__(self, n: int, depth: int) -> None:
        super().__init__()
        self.weight, self.depth = nn.Parameter(torch.zeros(n)), depth

    def forward(self, x: Tensor) -> Tensor:
        value = self.weight * x
        for _ in range(self.depth):
            value = value.tanh()
        return value.sum()


N = 10_000


def scale_step(depth: int) -> Step:
    module, x = Scale(N, depth), torch.zeros(N)
    return Step(module, [x], lambda: module(x))


@pytest.mark.parametrize("accumulate", [False, True])
def test_every_part_equals_a_count_by_hand(accumulate: bool) -> None:
    """When the gradient of the last tanh is taken: x, five tanh and that gradient; no gradient of w but an earlier one."""
    estimate = estimate_step(lambda: scale_step(5), accumulate=accumulate)
    assert estimate.parameters == 4 * N
    assert estimate.gradients == 4 * N * accumulate
    assert estimate.optimizer == 3 * 4 * N
    assert estimate.activations == pytest.approx(7 * 4 * N, abs=64)
    assert estimate.peak == estimate.parameters + estimate.gradients + estimate.optimizer + estimate.activations


def test_the_update_of_the_weights_may_take_most() -> None:
    """One tanh is less than what AdamW needs: the gradient of w, a root and a quotient, beside x."""
    estimate = estimate_step(lambda: scale_step(0))
    assert estimate.gradients == 4 * N
    assert estimate.activations == pytest.approx(3 * 4 * N, abs=64)


def test_without_training_only_weights_and_temporaries_take_memory() -> None:
    """w, x, a tanh and the one before it; no gradient, no optimizer."""
    estimate = estimate_step(lambda: scale_step(5), training=False)
    assert estimate.gradients == estimate.optimizer == 0
    assert estimate.peak == pytest.approx(4 * 4 * N, abs=64)


def test_autocast_keeps_no_copies_of_weights() -> None:
    """Both weights, and a copy of one of them at a time, as in Lightning."""

    def make_step() -> Step:
        module, x = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 100, bias=False)), torch.zeros(1, 100)
        return Step(module, [x], lambda: module(x))

    estimate = estimate_step(make_step, training=False, precision="bf16-mixed")
    assert estimate.peak == pytest.approx((2 * 4 + 2) * 100**2, abs=2000)


def test_shared_storage_counts_once() -> None:
    x = {}

    def make_step() -> Step:
        x["all"] = torch.zeros(1000)
        return Step(nn.Identity(), [x["all"], x["all"][:500], x["all"].view(10, 100)], lambda: x["all"][1:])

    assert estimate_step(make_step, training=False).peak == 4000


@pytest.mark.parametrize(("n", "k"), [(300, 0), pytest.param(1500, 2, marks=pytest.mark.slow)])
def test_the_count_matches_the_tracker_of_pytorch(n: int, k: int) -> None:
    """MemTracker, which follows modules too and takes six times as long."""
    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker
    observed: dict[str, Any] = {}

    class Root(nn.Module):
        def __init__(self, step: Step) -> None:
            super().__init__()
            self.network, self.run = step.module, step.run

        def forward(self) -> Tensor:
            return self.run()

    def tracked(make_step: Any, **_: Any) -> None:
        """The same step under the tracker; the second mode returns values of tensors, and its count is not used."""
        with fake_tensors():
            step = make_step()
            root, tracker_ = Root(step), tracker()
            tracker_.track_external(root, *step.inputs)
            with tracker_, StorageCounter("cpu"):
                root().backward()
            observed["peak"] = tracker_.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]

    estimate = estimate_training(SMALL, n_cells=n, n_recomputed=k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "estimate_step", tracked)
        estimate_training(SMALL, n_cells=n, n_recomputed=k)
    assert estimate.peak - estimate.optimizer == pytest.approx(observed["peak"], rel=1e-3)


def test_only_the_device_of_the_step_is_counted() -> None:
    counter = StorageCounter("cuda")
    counter.track(torch.zeros(5))
    assert counter.peak == 0


def test_an_operator_with_a_known_shape_is_counted() -> None:
    """What searches a tree outside of PyTorch takes part in an estimate like this."""

    @torch.library.custom_op("alphastomics_tests::nearest", mutates_args=())
    def nearest(x: Tensor, k: int) -> Tensor:
        raise AssertionError("an estimate computes nothing")

    @nearest.register_fake
    def _(x: Tensor, k: int) -> Tensor:
        return x.new_empty(len(x), k, dtype=torch.int64)

    def make_step() -> Step:
        x = torch.zeros(N)
        return Step(nn.Identity(), [x], lambda: x[nearest(x, 5)])

    assert estimate_step(make_step, training=False).peak == N * (4 + 5 * 8 + 5 * 4)


# -- behavior -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "training"),
    [
        ({"n_dims": 3}, {}),
        ({"attention": "linear", "gate_type": "none"}, {}),
        ({"use_moe": True, "num_experts": 3, "moe_top_k": 2, "expert_width": "full"}, {"n_recomputed": 1}),
        ({"mask_tokens": True}, {"masking": MaskingConfig()}),
        ({"attention": "geometric", "pair_features": "factorized"}, {"n_recomputed": 1}),
        ({"attention": "neighbor", "n_neighbors": 8, "sparse_pairs": "hybrid", "sequence": True}, {}),
        ({"attention": "axial", "residual": "hyper"}, {}),
        ({}, {"mode": "expr_to_pos"}),
        ({}, {"mode": "pos_to_expr", "shared_frame": True}),
        ({"dropout": 0.1}, {"precision": "bf16-mixed", "n_recomputed": 1}),
    ],
)
def test_every_kind_of_network_and_training_has_an_estimate(network: dict[str, Any], training: dict[str, Any]) -> None:
    config = replace(CONFIG, n_layers=1, **network)
    estimate = estimate_training(config, n_cells=300, **training)
    assert 0 < estimate.parameters < estimate.peak
    called = estimate_inference(config, n_cells=300)
    assert called.gradients == called.optimizer == 0
    assert called.parameters == estimate.parameters
    assert called.peak < estimate.peak


def test_more_of_anything_takes_more_and_16_bits_take_less() -> None:
    config = replace(CONFIG, n_layers=1)
    peak = lambda **arguments: estimate_training(config, **({"n_cells": 200} | arguments)).peak
    usual = peak()
    assert peak(n_cells=400) > usual
    assert peak(n_contexts=2) > usual
    assert peak(accumulate=True) > usual
    assert peak(n_recomputed=1) < usual
    assert peak(precision="bf16-mixed") < usual


def test_evenly_used_experts_take_the_memory_of_their_rows() -> None:
    """Two of four experts, each as wide as the dense network, have twice its hidden layers."""
    config = replace(CONFIG, n_layers=1, d_model=256)
    experts = {"use_moe": True, "expert_width": "full"}
    dense, mixed = (estimate_training(replace(config, **more), n_cells=1000).activations for more in ({}, experts))
    hidden = 2 * 4 * 1000 * 4 * 256  # before and after GELU, in bytes
    assert hidden < mixed - dense < 2 * hidden


def test_nothing_is_allocated_and_no_number_is_drawn() -> None:
    """The batch alone would take 8 GiB, and the weights 5."""
    state = torch.get_rng_state()
    before = resident()
    estimate = estimate_training(replace(CONFIG, n_genes=2_000_000, n_layers=1), n_cells=512)
    assert estimate.peak > 40 * 2**30
    assert resident() - before < 100 * MIB
    assert torch.equal(torch.get_rng_state(), state)


def resident() -> int:
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if path.exists() else 0


@pytest.mark.slow
def test_the_fitter_takes_the_smallest_number_of_blocks_that_fits() -> None:
    """k fits, k - 1 does not, with the estimator itself."""
    config = replace(CONFIG, n_layers=4)
    curve = [estimate_training(config, n_cells=800, n_recomputed=k).peak for k in range(5)]
    assert curve == sorted(curve, reverse=True)

    budget = (curve[2] + curve[3]) // 2
    assert MemoryFitter(config=config, n_parameters=budget, budget=budget).fit(800, 1).n_recomputed == 3


def test_an_estimate_prints_on_one_line() -> None:
    estimate = MemoryEstimate(parameters=2**30, gradients=2**29, optimizer=3 * 2**30, activations=2**31)
    assert str(estimate) == "6.50 GiB (parameters 1.00, gradients 0.50, optimizer 3.00, activations 2.00)"


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_data_dependent_shape_raises() -> None:
    def make_step() -> Step:
        x = torch.zeros(10)
        return Step(nn.Identity(), [x], lambda: x.unique())

    with pytest.raises(NotImplementedError, match=r"aten\._unique2\.default"):
        estimate_step(make_step, training=False)


def test_an_unknown_precision_raises() -> None:
    with pytest.raises(ValueError, match="precision='64-true'.*'32'"):
        estimate_training(CONFIG, n_cells=10, precision="64-true")
