"""A stand-in for the network that returns the positions of its cells, for tests of placements."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from alphastomics.diffusion import Process
from alphastomics.nn import Prediction
from alphastomics.sampling import Sampler
from rotations import random_rotation

if TYPE_CHECKING:
    from torch import Tensor


class Oracle:
    """A network that returns the positions (they are its embedding), or with ``rigid`` turns and shifts every context."""

    position_missing = 0.0

    def __init__(self, n_dims: int, *, rigid: bool) -> None:
        self.config = SimpleNamespace(n_dims=n_dims)
        self.rigid = rigid
        self.generator = torch.Generator().manual_seed(0)
        self.n_calls = 0

    def trunk(self, h: Tensor, t_expr: Tensor, t_pos: Tensor, mask: Any, predict: Any, *, sequence: Any) -> Prediction:
        self.n_calls += 1
        assert not bool(t_expr.any())  # clean
        assert bool((t_pos == 1).all())  # absent
        x = h
        if self.rigid:
            rotation = random_rotation(self.config.n_dims, self.generator)
            x = h @ rotation + 10 * torch.randn(1, 1, self.config.n_dims, generator=self.generator)
        return Prediction(expression=None, position=x, latent=h)


def sampler_of(oracle: Any, frame: str = "slice", **fitted: Any) -> Sampler:
    """A sampler of positions with this network."""
    schema: Any = SimpleNamespace(frame=frame, spacing=1e-6, scale=1.0)
    return Sampler(module=oracle, diffusion=Process(), schema=schema, mode="expr_to_pos", **fitted)
