"""What a training may change for the whole process is as it was when training is over."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from alphastomics.train.distributed import devices as determinism
from alphastomics.train.distributed.devices import (
    REPEATABLE,
    WORKSPACE,
    check_cublas_workspace,
    preserve_algorithm_settings,
    seeded_generators,
)


@pytest.fixture(autouse=True)
def _as_it_was():
    workspace, benchmark = os.environ.get(WORKSPACE), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    os.environ.pop(WORKSPACE, None)
    if workspace is not None:
        os.environ[WORKSPACE] = workspace


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get(WORKSPACE),
    )


def test_draws_follow_the_seed_and_generators_are_restored():
    drawn = []
    for state, seed in ((1, 7), (2, 7), (3, 8)):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        with seeded_generators(seed):
            drawn.append(torch.rand(4).tolist())
        assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1] != drawn[2]


def test_no_gpu_is_started_or_seeded(monkeypatch):
    """One that was started in a process serves none that is forked from it."""

    def fail(*_):
        pytest.fail("a GPU was asked for")

    for name in ("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state", "init", "_lazy_call"):
        monkeypatch.setattr(torch.cuda, name, fail)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with seeded_generators(0):
        torch.rand(1)


@pytest.mark.parametrize("before", [(False, False, False, None), (True, True, True, ":16:8")])
@pytest.mark.parametrize("fails", [False, True])
def test_settings_are_restored_after_errors(before, fails, monkeypatch):
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.benchmark = before[2]
    os.environ.pop(WORKSPACE, None)
    if before[3] is not None:
        os.environ[WORKSPACE] = before[3]

    @preserve_algorithm_settings()
    def train():
        torch.use_deterministic_algorithms(not before[0])
        torch.backends.cudnn.benchmark = not before[2]
        os.environ[WORKSPACE] = REPEATABLE[0]
        if fails:
            raise ValueError("broken")

    for _ in range(2):  # a decorator is used again
        if fails:
            with pytest.raises(ValueError, match="broken"):
                train()
        else:
            train()
        assert settings() == before


@pytest.mark.parametrize(
    ("deterministic", "kind", "started", "workspace", "expects_warning"),
    [
        (True, "cuda", True, None, True),
        ("warn", "cuda", True, ":0:0", True),
        (True, "cuda", True, ":16:8", False),
        (True, "cuda", False, None, False),
        (True, "cpu", True, None, False),
        (None, "cuda", True, None, False),
    ],
)
def test_a_warning_if_cublas_was_already_initialized(
    deterministic, kind, started, workspace, expects_warning, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.delenv(WORKSPACE, raising=False)
    if workspace is not None:
        monkeypatch.setenv(WORKSPACE, workspace)
    with caplog.at_level(logging.WARNING, logger=determinism.__name__):
        check_cublas_workspace(deterministic, torch.device(kind))
    assert (f"set {WORKSPACE}=:4096:8 before Python starts" in caplog.text) == expects_warning
