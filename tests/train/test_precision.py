"""Losses under autocast, and usable memory as the system reports it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from alphastomics.diffusion.losses import aligned_error, by_features, by_positions, distance_error, neighborhood_errors
from alphastomics.train.distributed import devices as precision
from alphastomics.train.distributed.devices import usable_memory

if TYPE_CHECKING:
    from pathlib import Path

mixed = torch.autocast("cpu", dtype=torch.bfloat16)


def test_losses_in_16_bits_are_finite_and_near_those_in_32(make_plan, make_batch) -> None:
    """Each loss and the gradient; the losses themselves are computed without autocast, so the differences are those of the network."""
    plan, batch = make_plan(mode="any"), make_batch(6)
    found = []
    for sixteen in (False, True):
        plan.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=sixteen):
            losses = plan.objective.losses(batch)
            loss = plan.objective.total(losses, batch)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in plan.parameters() if p.grad is not None])
        found.append((losses, gradient))
    (exact, gradient), (rounded, other) = found
    assert exact.keys() == rounded.keys()
    for name, value in exact.items():
        assert rounded[name].dtype == torch.float32
        assert rounded[name].isfinite().all()
        torch.testing.assert_close(rounded[name].mean(), value.mean(), rtol=0.02, atol=1e-3, msg=name)
    assert other.isfinite().all()
    assert float((other - gradient).norm() / gradient.norm()) < 0.05


@pytest.mark.parametrize("loss", [distance_error, aligned_error, by_features, by_positions])
def test_losses_of_given_values_are_the_same_in_16_bits(loss) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 2, 60, 2, generator=generator)
    mask = torch.ones(2, 60, dtype=torch.bool)

    def error() -> torch.Tensor:
        if loss in (distance_error, aligned_error):
            return loss(x, y, mask)
        return neighborhood_errors([loss(x, 0.5)], y, mask)

    exact = error()
    with mixed:
        assert torch.equal(error(), exact)


def test_the_budget_of_a_cpu_is_the_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16000 kB\nMemFree:         100 kB\nMemAvailable:    12345 kB\n")
    monkeypatch.setattr(precision, "MEMINFO", meminfo)
    assert usable_memory("cpu") == 12345 * 1024
    assert usable_memory(torch.device("mps")) == 12345 * 1024


@pytest.mark.parametrize("content", [None, "MemTotal:       16000 kB\n"])
def test_usable_memory_without_meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    meminfo = tmp_path / "meminfo"
    if content is not None:
        meminfo.write_text(content)
    monkeypatch.setattr(precision, "MEMINFO", meminfo)
    answers = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", answers.__getitem__, raising=False)
    assert usable_memory("cpu") == 4_096_000
    monkeypatch.delattr(os, "sysconf")
    with pytest.raises(ValueError, match="limit="):
        usable_memory("cpu")


def test_the_budget_of_a_gpu_is_95_percent_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also free is what PyTorch's allocator keeps from earlier tensors."""
    stub = SimpleNamespace(
        mem_get_info=lambda _: (10_000, 80_000), memory_reserved=lambda _: 5000, memory_allocated=lambda _: 3000
    )
    monkeypatch.setattr(torch, "cuda", stub)
    assert usable_memory("cuda:0") == 0.95 * (10_000 + 5000 - 3000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_budget_of_this_gpu_is_below_its_memory() -> None:
    free, total = torch.cuda.mem_get_info()
    assert 0.9 * free < usable_memory("cuda") < total


def test_an_argument_overrides_the_free_memory() -> None:
    assert usable_memory("cpu", 5000) == usable_memory("cuda", 5000) == 5000
    with pytest.raises(ValueError, match="limit=0"):
        usable_memory("cpu", 0)


def test_several_processes_get_the_same_share_of_all_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", answers.__getitem__, raising=False)
    assert usable_memory("cpu", n_processes=2) == int(0.8 * 4_096_000 / 2)
    stub = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(total_memory=80_000))
    monkeypatch.setattr(torch, "cuda", stub)
    assert usable_memory("cuda:1", n_processes=2) == 64_000
    assert usable_memory("cuda:1", 5000, n_processes=2) == 5000
