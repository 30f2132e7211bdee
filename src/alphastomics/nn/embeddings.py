r"""Embeddings of positions, local density and timesteps.

.. math::

    \phi(x) = [\,x,\; \sin(2\pi x F),\; \cos(2\pi x F)\,], \qquad
    \psi(t) = [\,\sin(\omega_k t),\; \cos(\omega_k t)\,]_k

The columns of F are directions, spread evenly over the circle or sphere, times geometrically spaced frequencies, so that the
features of two cells determine their direction and distance at every length scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Number of frequencies, lowest and highest: of positions in cycles per model unit (a slice spans about four units), and of time.
POSITION_WAVES = 48, 0.05, 1.5
TIMESTEP_WAVES = 32, 0.25, 32.0


def _frequencies(n: int, lowest: float, highest: float) -> Tensor:
    """Geometrically spaced frequencies (n,) in double precision."""
    return torch.logspace(math.log10(lowest), math.log10(highest), n, dtype=torch.float64)


def directions(n: int, n_dims: int) -> Tensor:
    """Unit vectors (n, D) of which any consecutive ones are evenly spread: golden angles, or the R2 sequence (Roberts 2018).

    On the half sphere a spiral would correlate the direction of a wave with its frequency.
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
    """Embedding (B, N, d) of positions (B, N, D) in model units.

    Parameters
    ----------
    n_dims
        D, 2 or 3.
    d_model
        Width d.
    """

    def __init__(self, n_dims: int, d_model: int) -> None:
        super().__init__()
        self.frequencies: Tensor
        scale = _frequencies(*POSITION_WAVES)
        n_frequencies = len(scale)
        waves = scale[:, None] * directions(n_frequencies, n_dims)
        self.register_buffer("frequencies", (2 * math.pi * waves).T.float(), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * n_frequencies + n_dims, d_model), nn.GELU(), nn.Linear(d_model, d_model))

    def forward(self, position: Tensor) -> Tensor:
        """Embed ``position`` (B, N, D)."""
        with torch.autocast(position.device.type, enabled=False):  # bfloat16 is too coarse for phases
            phase = position @ self.frequencies
        return self.mlp(torch.cat([position, phase.sin(), phase.cos()], dim=-1))


class LocalDensityEmbedding(nn.Module):
    """Embedding (B, N, d) of local density (B, N, K), logarithms of relative distances to neighbors."""

    SPREAD = 0.3  # standard deviation of the logarithms in most tissues

    def __init__(self, n_ranks: int, d_model: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(n_ranks, d_model), nn.GELU(), nn.Linear(d_model, d_model))

    def forward(self, local_density: Tensor) -> Tensor:
        """Embed ``local_density`` (B, N, K)."""
        return self.mlp(local_density / self.SPREAD)


class TimestepEmbedding(nn.Module):
    """One conditioning vector (B, d) from the timesteps of both modalities, each (B,), in [0, 1]."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.frequencies: Tensor
        scale = _frequencies(*TIMESTEP_WAVES)
        self.register_buffer("frequencies", (2 * math.pi * scale).float(), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(4 * len(scale), d_model), nn.SiLU(), nn.Linear(d_model, d_model), nn.SiLU())

    def forward(self, t_expr: Tensor, t_pos: Tensor) -> Tensor:
        """Embed both timesteps, each (B,)."""
        phase = torch.stack([t_expr, t_pos], dim=1)[..., None] * self.frequencies  # (B, 2, K)
        return self.mlp(torch.cat([phase.sin(), phase.cos()], dim=-1).flatten(1))
