"""Random factors, and the largest relative difference of two tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from alphastomics.nn.pair import PairFactors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@pytest.fixture
def mask() -> Tensor:
    """Cells of two contexts, 11 and 8 of which are real."""
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, [1, 5, 10]] = False
    return mask


@pytest.fixture
def make_factors() -> Callable[..., PairFactors]:
    def make(b: int = 2, c: int = 8, n: int = 11, rank: int = 3, *, mask: Tensor | None = None) -> PairFactors:
        generator = torch.Generator().manual_seed(4)
        left, right = torch.randn(2, b, c, n, rank, generator=generator, dtype=torch.float64)
        return PairFactors.masked(left + 0.3, right, mask)

    return make


@pytest.fixture
def difference() -> Callable[[Tensor, Tensor], float]:
    """Largest difference over the largest entry of the second tensor."""
    return lambda actual, expected: float((actual - expected).detach().abs().max() / expected.detach().abs().max())
