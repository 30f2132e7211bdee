"""A small denoiser whose adaptive norms do not start at zero, so that timesteps and every path matter."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.nn.block import AdaptiveNorm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

LIMIT = 300  # seconds for all cases of one number of processes


class Inputs(NamedTuple):
    expression: Tensor
    position: Tensor
    t_expr: Tensor
    t_pos: Tensor


@pytest.fixture
def make_denoiser() -> Callable[..., Denoiser]:
    def make(**config: Any) -> Denoiser:
        torch.manual_seed(1)
        config = {"n_genes": 9, "n_dims": 2, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_latent": 8} | config
        denoiser = Denoiser(DenoiserConfig(**config))
        for module in denoiser.modules():
            if isinstance(module, AdaptiveNorm):
                torch.nn.init.normal_(module.modulation.weight, std=0.3)
        torch.nn.init.normal_(denoiser.expression_missing)
        torch.nn.init.normal_(denoiser.position_missing)
        return denoiser.eval()

    return make


@pytest.fixture
def make_inputs() -> Callable[..., Inputs]:
    def make(b: int = 3, n: int = 10, n_dims: int = 2, n_genes: int = 9) -> Inputs:
        generator = torch.Generator().manual_seed(2)
        expression = torch.randn(b, n, n_genes, generator=generator)
        position = torch.randn(b, n, n_dims, generator=generator)
        return Inputs(expression, position, torch.linspace(0, 0.5, b), torch.linspace(0.9, 0.2, b))

    return make


@pytest.fixture(scope="session")
def run_ranks() -> Callable[[str, Path, int], list[dict[str, Any]]]:
    """Run a program in several processes, rank 0 of 2, rank 1 of 2 and so on, and read what each has written."""

    def run(program: str, folder: Path, world_size: int) -> list[dict[str, Any]]:
        command = [sys.executable, "-W", "error", program, str(folder)]
        processes = [
            subprocess.Popen([*command, str(rank), str(world_size)], env=os.environ | {"OMP_NUM_THREADS": "1"})
            for rank in range(world_size)
        ]
        try:
            assert [process.wait(timeout=LIMIT) for process in processes] == [0] * world_size
        finally:
            for process in processes:
                process.kill()
        return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(world_size)]

    return run
