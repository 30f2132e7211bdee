"""Losses of large contexts: a sample of pairs or of cells is an unbiased estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from alphastomics.diffusion import losses
from alphastomics.diffusion.losses import by_features, by_positions, distance_error, neighborhood_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Loss = Callable[..., Tensor]

N = 60  # cells of the large contexts here
LOSSES: dict[str, Loss] = {
    "distance": lambda x, y, mask, **rngs: distance_error(x[..., :2], y, mask, **rngs),
    "neighbor": lambda x, y, mask, **rngs: neighborhood_errors([by_features(x, 0.5)], y, mask, **rngs)[0],
    "layout": lambda x, y, mask, **rngs: neighborhood_errors([by_positions(x[..., :2], 0.5)], y, mask, **rngs)[0],
}
each = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of more than 40 cells is large."""
    for name, value in {"MAX_EXACT_CELLS": 40, "N_ANCHORS": 16, "N_PAIRS": 120, "BLOCK": 10}.items():
        monkeypatch.setattr(losses, name, value)


def cells(n: int, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features of which the first two are predicted positions, true positions, and a full mask."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, n, 5, generator=generator, requires_grad=True)
    return x, torch.randn(1, n, 2, generator=generator), torch.ones(1, n, dtype=torch.bool)


def rngs(*seeds: int) -> list[np.random.Generator]:
    return [np.random.default_rng(seed) for seed in seeds]


def value_and_gradient(loss: Loss, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    value = loss(x, *arguments, **options).sum()
    (gradient,) = torch.autograd.grad(value, x)
    return torch.cat([value.detach()[None], gradient[0, :3].flatten()])


@each
def test_a_sample_has_the_value_and_the_gradient_of_all_on_average(loss: Loss) -> None:
    x, y, mask = cells(N)
    exact = value_and_gradient(loss, x, y, mask)
    draws = torch.stack([value_and_gradient(loss, x, y, mask, rngs=rngs(i)) for i in range(300)])
    assert float(draws[:, 0].std()) > 0
    error = (draws.mean(0) - exact).abs()
    assert bool((error <= 4 * draws.std(0) / len(draws) ** 0.5 + 1e-6).all())


@each
def test_without_generators_all_pairs_are_used(loss: Loss) -> None:
    x, y, mask = cells(N)
    assert torch.equal(loss(x, y, mask), loss(x, y, mask, rngs=None))
    assert not torch.allclose(loss(x, y, mask), loss(x, y, mask, rngs=rngs(0)), rtol=1e-4)


@each
def test_padding_draws_nothing_else(loss: Loss) -> None:
    x, y, mask = cells(N)
    alone = value_and_gradient(loss, x, y, mask, rngs=rngs(3))
    pad = lambda value: torch.cat([value, value.new_ones(1, 17, *value.shape[2:])], dim=1)
    padded = pad(mask)
    padded[:, N:] = False
    x_padded = pad(x.detach()).requires_grad_()
    torch.testing.assert_close(value_and_gradient(loss, x_padded, pad(y), padded, rngs=rngs(3)), alone)


@each
def test_a_small_context_beside_a_large_one_is_exact(loss: Loss) -> None:
    x, y, mask = (value.repeat(2, *[1] * (value.ndim - 1)) for value in cells(N))
    mask[1, 30:] = False
    found = loss(x, y, mask, rngs=rngs(1, 2))
    assert found[0] != loss(x, y, mask)[0]
    torch.testing.assert_close(found[1:], loss(x[1:, :30], y[1:, :30], mask[1:, :30]))


@each
def test_rows_in_blocks_are_rows_at_once(loss: Loss, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, mask = cells(N)
    blocked = value_and_gradient(loss, x, y, mask)
    monkeypatch.setattr(losses, "BLOCK", 1024)
    torch.testing.assert_close(blocked, value_and_gradient(loss, x, y, mask))
