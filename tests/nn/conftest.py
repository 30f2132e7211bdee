"""A small denoiser whose adaptive norms do not start at zero, so that clocks and every path matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from alphastomics.nn import Denoiser, DenoiserConfig
from alphastomics.nn.block import AdaptiveNorm

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


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
