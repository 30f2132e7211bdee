r"""Features of positions and of timesteps.

.. math::

    \phi(x) = [\,x,\; \sin(2\pi x F),\; \cos(2\pi x F)\,], \qquad
    \psi(t) = [\,\sin(\omega_k t),\; \cos(\omega_k t)\,]_k

F holds directions spread evenly over the circle or sphere at geometrically spaced frequencies, so that both the
direction and the distance between two cells can be read off their features at every length scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def directions(n: int, n_dims: int) -> Tensor:
    """N unit vectors (n, D), evenly spread in every run of them: golden angles, or plastic numbers on the half sphere.

    A spiral over the sphere would tie the direction of a wave to its frequency. (Roberts 2018, the R2 sequence.)
    """
    k = torch.arange(n, dtype=torch.float64)
    if n_dims == 2:
        golden = (1 + math.sqrt(5)) / 2
        angle = math.pi * (k / golden % 1)
        return torch.stack([angle.cos(), angle.sin()], dim=1)
    plastic = 1.324717957244746
    z = 1 - k / plastic**2 % 1
    angle = 2 * math.pi * (k / plastic % 1)
    r = (1 - z**2).sqrt()
    return torch.stack([r * angle.cos(), r * angle.sin(), z], dim=1)


class FourierPosition(nn.Module):
    """Positions (B, N, D) in model units to features (B, N, d).

    Parameters
    ----------
    n_dims
        D, 2 or 3.
    d_model
        Width d.
    n_frequencies
        Number of columns of F.
    lowest, highest
        Range of frequencies in cycles per model unit (a slice spans about four units).
    """

    def __init__(
        self, n_dims: int, d_model: int, *, n_frequencies: int = 48, lowest: float = 0.05, highest: float = 1.5
    ) -> None:
        super().__init__()
        self.frequencies: Tensor
        scale = torch.logspace(math.log10(lowest), math.log10(highest), n_frequencies, dtype=torch.float64)
        waves = scale[:, None] * directions(n_frequencies, n_dims)
        self.register_buffer("frequencies", (2 * math.pi * waves).T.float(), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * n_frequencies + n_dims, d_model), nn.GELU(), nn.Linear(d_model, d_model))

    def forward(self, position: Tensor) -> Tensor:
        """``position`` (B, N, D) to (B, N, d)."""
        with torch.autocast(position.device.type, enabled=False):  # bfloat16 turns fast waves by a good part of a cycle
            phase = position @ self.frequencies
        return self.mlp(torch.cat([position, phase.sin(), phase.cos()], dim=-1))


class LocalDensityEmbedding(nn.Module):
    """Local density (B, N, K), logarithms of relative distances to neighbors, to (B, N, d)."""

    SPREAD = 0.3  # standard deviation of the logarithms in most tissues

    def __init__(self, n_ranks: int, d_model: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(n_ranks, d_model), nn.GELU(), nn.Linear(d_model, d_model))

    def forward(self, local_density: Tensor) -> Tensor:
        """``local_density`` (B, N, K) to (B, N, d)."""
        return self.mlp(local_density / self.SPREAD)


class TimestepEmbedding(nn.Module):
    """Timesteps of both modalities, each (B,), in [0, 1], to one conditioning vector (B, d)."""

    def __init__(self, d_model: int, *, n_frequencies: int = 32, lowest: float = 0.25, highest: float = 32.0) -> None:
        super().__init__()
        self.frequencies: Tensor
        scale = torch.logspace(math.log10(lowest), math.log10(highest), n_frequencies, dtype=torch.float64)
        self.register_buffer("frequencies", (2 * math.pi * scale).float(), persistent=False)
        self.mlp = nn.Sequential(
            nn.Linear(4 * n_frequencies, d_model), nn.SiLU(), nn.Linear(d_model, d_model), nn.SiLU()
        )

    def forward(self, t_expr: Tensor, t_pos: Tensor) -> Tensor:
        """Both timesteps (B,) to (B, d)."""
        phase = torch.stack([t_expr, t_pos], dim=1)[..., None] * self.frequencies  # (B, 2, K)
        return self.mlp(torch.cat([phase.sin(), phase.cos()], dim=-1).flatten(1))
