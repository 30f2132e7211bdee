"""Position features keep direction and distance; timestep features keep both timesteps."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from alphastomics.nn.embeddings import FourierPosition, TimestepEmbedding

dimensions = pytest.mark.parametrize("n_dims", [2, 3])


def features(position: torch.Tensor) -> torch.Tensor:
    """Sines and cosines alone: what the first layer sees besides the position itself."""
    embedding = FourierPosition(position.shape[-1], 32)
    seen: list[torch.Tensor] = []
    embedding.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    embedding(position)
    return seen[0]


def unit_vectors(n: int, n_dims: int) -> torch.Tensor:
    x = torch.randn(n, n_dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (x / x.norm(dim=-1, keepdim=True)).float()


@dimensions
def test_features_match_the_formula(n_dims):
    position = 2 * torch.randn(5, n_dims)
    embedding = FourierPosition(n_dims, 32)
    frequency = embedding.frequencies.double().numpy() / (2 * math.pi)
    np.testing.assert_allclose(np.linalg.norm(frequency, axis=0), np.geomspace(0.05, 1.5, 48), rtol=1e-5)
    phase = 2 * np.pi * position.double().numpy() @ frequency
    expected = np.concatenate([position, np.sin(phase), np.cos(phase)], axis=1)
    hidden = torch.from_numpy(expected).float()
    torch.testing.assert_close(embedding(position), embedding.mlp(hidden), atol=1e-4, rtol=1e-4)


@dimensions
def test_no_direction_is_favored(n_dims):
    """Frequencies of similar length must point everywhere, or some directions are resolved worse than others."""
    embedding = FourierPosition(n_dims, 32)
    direction = (embedding.frequencies / embedding.frequencies.norm(dim=0)).double()
    spread = torch.linalg.eigvalsh(direction @ direction.T / direction.shape[1])
    assert float(spread[0]) > 0.7 / n_dims
    for third in direction.split(16, dim=1):
        assert float(torch.linalg.eigvalsh(third @ third.T / 16)[0]) > 0.4 / n_dims


@dimensions
@pytest.mark.parametrize("distance", [0.1, 0.5, 2.0])
def test_features_distinguish_directions_and_distances(n_dims, distance):
    """Two displacements of equal length, and two of equal direction, differ in their features, near and far."""
    direction = unit_vectors(20, n_dims)
    scale = features(torch.zeros(1, n_dims)).norm()
    ring = features(distance * direction)
    apart = torch.cdist(ring, ring) / scale
    angle = torch.cdist(direction, direction)
    assert float((apart / angle)[~torch.eye(20, dtype=torch.bool)].min()) > 0.1 * min(distance, 1.0)
    ray = features(torch.tensor([0.8, 1.0, 1.2])[:, None] * distance * direction[:1])
    assert float((ray.diff(dim=0).norm(dim=-1) / scale).min()) > 0.02 * min(distance, 1.0)


@dimensions
def test_distance_and_direction_are_linear_in_the_features(n_dims):
    generator = torch.Generator().manual_seed(0)
    x = 1.5 * torch.randn(600, n_dims, generator=generator)
    angle = torch.atan2(x[:, 1], x[:, 0])
    targets = {"distance": x.norm(dim=-1), "direction": torch.stack([angle.cos(), angle.sin()], 1)[:, 0]}
    phi = features(x).numpy()
    for target in targets.values():
        y = target.numpy()
        assert Ridge(alpha=1e-2).fit(phi[:400], y[:400]).score(phi[400:], y[400:]) > 0.7


def test_autocast_does_not_round_phases():
    """A product of bfloat16 turns the fastest waves by a good part of a cycle."""
    position = 2 * torch.randn(500, 2, generator=torch.Generator().manual_seed(0))
    exact = features(position)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = features(position).float()
    torch.testing.assert_close(rounded, exact, atol=5e-3, rtol=0)


def test_each_timestep_is_read_and_they_are_not_exchangeable():
    torch.manual_seed(0)
    timestep = TimestepEmbedding(32)
    t = torch.tensor([0.0, 0.01, 0.02, 0.1, 0.5, 0.9, 0.98, 0.99, 1.0])
    first, second = torch.meshgrid(t, t, indexing="ij")
    vectors = timestep(first.flatten(), second.flatten()).detach()
    apart = torch.cdist(vectors, vectors) + torch.eye(len(vectors)) * 1e9
    assert float(apart.min()) > 0.01 * float(vectors.std() * 32**0.5)
