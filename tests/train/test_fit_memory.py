"""What fits, with a peak that is a formula, and the bound that spares an estimate."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from alphastomics.diffusion import MaskingConfig
from alphastomics.nn import Denoiser, DenoiserConfig, count_parameters
from alphastomics.train.memory import fit as fit_memory, layout as memory_layout
from alphastomics.train.memory.estimate import MemoryEstimate, estimate_training
from alphastomics.train.memory.fit import MemoryFitter, recomputed_blocks
from alphastomics.train.memory.layout import fit_batch_layout, fits_in_memory

DEPTH = 6
CONFIG = DenoiserConfig(n_genes=100, n_dims=2, n_layers=DEPTH)


def formula(n: int, c: int, k: int) -> int:
    """Every block holds a byte for each cell, a recomputed one none but while it runs again."""
    return 100 + c * n * (1 + DEPTH - k + (k > 0))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Estimates that were made; no bound is enough."""
    calls: list[dict[str, Any]] = []

    def estimate(config: DenoiserConfig, **arguments: Any) -> MemoryEstimate:
        calls.append(arguments)
        peak = formula(arguments["n_cells"], arguments["n_contexts"], arguments["n_recomputed"])
        return MemoryEstimate(parameters=0, gradients=0, optimizer=0, activations=peak)

    monkeypatch.setattr(fit_memory, "estimate_training", estimate)
    monkeypatch.setattr(MemoryFitter, "bound", lambda self, n_cells: 10**12)
    return calls


def fitter(budget: int, **arguments: Any) -> MemoryFitter:
    return MemoryFitter(config=CONFIG, n_parameters=1000, budget=budget, **arguments)


@pytest.mark.parametrize("budget", range(300, 3000, 100))
def test_contexts_are_reduced_before_blocks_are_recomputed(made: list[dict[str, Any]], budget: int) -> None:
    n, most = 100, 4
    contexts = [c for c in range(1, most + 1) if formula(n, c, 0) <= budget]
    blocks = [k for k in range(DEPTH + 1) if formula(n, 1, k) <= budget]
    if not blocks:
        with pytest.raises(ValueError, match=r"100 cells.*context_size="):
            fitter(budget).fit(n, most)
        return
    found = fitter(budget).fit(n, most)
    assert (found.n_contexts, found.n_recomputed) == ((max(contexts), 0) if contexts else (1, min(blocks)))
    assert found.estimate is not None
    assert found.estimate.peak <= budget


def test_gradients_of_earlier_parts_count_in_the_estimate(made: list[dict[str, Any]]) -> None:
    fitter(formula(100, 2, 0)).fit(100, 4)
    assert {call["n_contexts"]: call["accumulate"] for call in made if call["n_cells"] > 1} == {
        2: True,
        3: True,
        4: False,
    }


@pytest.mark.parametrize("asked", ["none", 2, "all"])
def test_given_arguments_are_kept(made: list[dict[str, Any]], asked: Any) -> None:
    k = recomputed_blocks(asked, DEPTH)
    assert k is not None
    assert fitter(formula(100, 2, k), recompute=asked).fit(100, 4)[:2] == (2, k)
    with pytest.raises(ValueError, match=rf"{k} of 6 blocks.* 99 cells"):
        fitter(formula(99, 1, k), recompute=asked).fit(100, 4)


@pytest.mark.parametrize(("device", "batch_size"), [("cpu", 1024), ("mps", 1024), ("cuda", 2048)])
def test_batches_are_larger_on_cuda(
    made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, device: str, batch_size: int
) -> None:
    def layout(batch_size: int | None, resumed: dict[str, int]) -> tuple[int, int]:
        fitted = fit_batch_layout(
            CONFIG,
            SimpleNamespace(slices=[SimpleNamespace(rows=range(5000))]),
            context_size=512,
            batch_size=batch_size,
            micro_batch_size=None,
            budget=1.0,
            recompute="auto",
            accelerator="auto",
            devices="auto",
            accumulate=False,
            resumed=resumed,
        )
        return fitted.batch_size, fitted.micro_batch_size

    monkeypatch.setattr(memory_layout, "device_of", lambda accelerator, devices: torch.device(device))
    monkeypatch.setattr(memory_layout, "usable_memory", lambda device, limit, n_processes: limit)
    assert layout(None, {}) == (batch_size, batch_size)
    assert layout(600, {}) == (600, 600)
    assert layout(None, {"batch_size": 1536, "micro_batch_size": 512}) == (1536, 512)  # resumed on another device


def test_the_longest_context_is_found_to_a_part_in_64(made: list[dict[str, Any]]) -> None:
    for n in (5000, 3217, 64):
        found = fitter(formula(n, 1, DEPTH)).longest(5000)
        assert n - 5000 // 64 <= found <= n
    with pytest.raises(ValueError, match="one cell"):
        fitter(50).longest(5000)


def test_nothing_is_estimated_twice(made: list[dict[str, Any]]) -> None:
    own = fitter(formula(100, 1, 3))
    own.fit(100, 4)
    n = len(made)
    own.fit(100, 4)
    assert len(made) == n


@pytest.mark.parametrize("error", [NotImplementedError("a shape"), ImportError("no module")])
def test_training_without_an_estimate_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(fit_memory, "estimate_training", fail)
    with caplog.at_level(logging.WARNING):
        assert fitter(10).fit(100, 4) == (4, 0, None)
        assert fitter(10).longest(100) == 100
    assert str(error) in caplog.text


def test_a_small_training_does_not_wait_for_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fit_memory, "estimate_training")
    small = fitter(2**30)
    assert small.fit(512, 2) == (2, 0, None)
    assert small.longest(512) == 512
    with pytest.raises(NameError):
        small.fit(2**20, 1)


def test_parameters_are_counted_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Recorded(Denoiser):
        def __init__(self, config: DenoiserConfig) -> None:
            super().__init__(config)
            made.append(self)

    monkeypatch.setattr(memory_layout, "Denoiser", Recorded)
    monkeypatch.setattr(memory_layout, "usable_memory", lambda *_, **__: 2**40)
    state = torch.get_rng_state()
    assert fits_in_memory(CONFIG, 100, mode="expr_to_pos")
    assert torch.equal(torch.get_rng_state(), state)
    assert {parameter.device.type for network in made for parameter in network.parameters()} == {"meta"}


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_bound_grows_with_the_cells(n: int, m: int) -> None:
    assert (fitter(1).bound(n) < fitter(1).bound(m)) == (n < m)


@pytest.mark.parametrize(
    ("network", "training"),
    [
        ({}, {}),
        ({"n_genes": 5, "d_model": 16, "n_layers": 1}, {}),
        ({"n_genes": 5000, "n_layers": 1}, {}),
        ({"mask_tokens": True, "n_dims": 3}, {"masking": MaskingConfig()}),
        ({"attention": "linear", "gate_type": "none"}, {"precision": "bf16-mixed"}),
        ({"use_moe": True, "num_experts": 8, "moe_top_k": 4, "expert_width": "full"}, {}),
        ({"residual": "hyper", "n_layers": 3}, {}),
    ],
)
def test_no_estimate_exceeds_the_bound(network: dict[str, Any], training: dict[str, Any]) -> None:
    config = replace(CONFIG, **{"n_layers": 2} | network)
    n_parameters = count_parameters(Denoiser(config)).total
    bound = MemoryFitter(config=config, n_parameters=n_parameters, budget=1).bound(600)
    assert 2 * estimate_training(config, n_cells=600, mode="any", accumulate=True, **training).peak < bound
