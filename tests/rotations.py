"""Random rotations and reflections for tests of invariance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def random_rotation(n_dims: int, generator: torch.Generator) -> Tensor:
    """A rotation or reflection (D, D), uniform over O(D) (Mezzadri 2007: QR of a Gaussian, signs fixed)."""
    q, r = torch.linalg.qr(torch.randn(n_dims, n_dims, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).float()
