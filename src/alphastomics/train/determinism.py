"""What a training sets for the whole process, and leaves as it was: generators, and the choice of algorithms."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
REPEATABLE = (":4096:8", ":16:8")  # what cuBLAS must be told, to give the same sums every time


@contextmanager
def own_generators(seed: int) -> Iterator[None]:
    """Seed PyTorch's generator for a while, and leave all generators as they were.

    Those of GPUs are kept where GPUs are in use. To ask a GPU that is not would start CUDA, after which no process can be
    forked for it.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(int(seed))
        yield


@contextmanager
def kept_algorithms() -> Iterator[None]:
    """Leave as they were the choice of algorithms and the workspaces of cuBLAS, which a trainer sets for the whole process."""
    enabled, warn_only = before = _algorithms()
    benchmark, workspace = torch.backends.cudnn.benchmark, os.environ.get(WORKSPACE)
    try:
        yield
    finally:
        if _algorithms() != before:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(WORKSPACE, None)
        else:
            os.environ[WORKSPACE] = workspace


def _algorithms() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def check_workspaces(deterministic: bool | str | None, device: torch.device) -> None:
    """Say where cuBLAS cannot be told any more to be deterministic: it reads its workspaces when CUDA starts."""
    told = os.environ.get(WORKSPACE) in REPEATABLE
    if deterministic and not told and device.type == "cuda" and torch.cuda.is_initialized():
        logger.warning(
            "CUDA was in use before deterministic=True was asked for, and cuBLAS keeps its workspaces; where every bit matters, "
            "set %s=%s before Python starts.", WORKSPACE, REPEATABLE[0],
        )  # fmt: skip
