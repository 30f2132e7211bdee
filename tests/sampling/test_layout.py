"""Refinement of a layout: gradients against autograd, neighbors that are found, and the distance from the mean."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from alphastomics.sampling._layout import (
    N_CELLS,
    PAIRS,
    _compare,
    _search,
    _width,
    attraction_gradient,
    refine_layout,
    repulsion_gradient,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def neighbors(x: torch.Tensor, k: int = 10) -> torch.Tensor:
    distance = torch.cdist(x, x).fill_diagonal_(torch.inf)
    return distance.topk(k, largest=False).indices


def preserved(true: torch.Tensor, predicted: torch.Tensor) -> float:
    pairs = zip(neighbors(true).tolist(), neighbors(predicted).tolist(), strict=True)
    return sum(len(set(a) & set(b)) for a, b in pairs) / (10 * len(true))


@pytest.fixture
def folded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A square whose halves lie on each other in the mean, and an embedding that separates them."""
    true = torch.rand(600, 2, generator=generator()) * 2 - 1
    mean = torch.stack([true[:, 0].abs() * 0.1, true[:, 1]], dim=1)
    waves = torch.randn(2, 32, generator=generator(1)) * 2
    return true, mean, F.normalize(torch.cat([(true @ waves).sin(), (true @ waves).cos()], dim=1), dim=1)


def test_cells_find_the_neighbors_of_their_embedding(folded):
    true, mean, feature = folded
    refined = refine_layout(mean, feature, generator())
    assert preserved(true, refined) > 1.3 * preserved(true, mean)
    assert float((refined - mean).square().sum(1).mean().sqrt()) < 0.5


def test_permuting_cells_permutes_the_layout_up_to_the_sampled_rows(folded):
    _, mean, feature = folded
    order = torch.randperm(len(mean), generator=generator(2))
    # 600 cells are fewer than the rows of an iteration: the sample is all of them, in some order.
    torch.testing.assert_close(
        refine_layout(mean[order], feature[order], generator()), refine_layout(mean, feature, generator())[order],
        atol=1e-3, rtol=0,
    )  # fmt: skip


def test_the_mean_is_left_alone(folded):
    _, mean, feature = folded
    before = mean.clone()
    assert not torch.equal(refine_layout(mean, feature, generator()), before)
    assert torch.equal(mean, before)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_few_cells(n):
    mean, feature = torch.randn(n, 3, generator=generator()), torch.zeros(n, 4)
    assert bool(refine_layout(mean, feature, generator()).isfinite().all())


def test_cells_on_one_spot_stay_finite():
    mean, feature = torch.zeros(50, 2), F.normalize(torch.randn(50, 8, generator=generator()), dim=1)
    assert bool(refine_layout(mean, feature, generator()).isfinite().all())


@pytest.mark.parametrize("n_dims", [2, 3])
def test_the_width_grows_as_the_distance_between_few_cells(n_dims):
    assert _width(10 * N_CELLS, n_dims) == _width(N_CELLS, n_dims)
    assert _width(N_CELLS // 2**n_dims, n_dims) == pytest.approx(2 * _width(N_CELLS, n_dims))


@st.composite
def layouts(draw) -> tuple[torch.Tensor, torch.Generator, float]:
    """Positions (N, D), a generator, and the squared width."""
    rng = generator(draw(st.integers(0, 10**6)))
    y = torch.randn(draw(st.integers(3, 30)), draw(st.sampled_from([2, 3])), generator=rng, dtype=torch.float64)
    return y, rng, draw(st.floats(0.01, 4.0))


@settings(max_examples=40)
@given(layout=layouts(), k=st.integers(1, 8))
def test_attraction_is_the_gradient_of_its_objective(layout, k):
    y, rng, squared_width = layout
    n = len(y)
    k = min(k, n - 1)
    near = torch.stack([(torch.randperm(n - 1, generator=rng)[:k] + i + 1) % n for i in range(n)])
    p = torch.rand(n, k, generator=rng, dtype=torch.float64).softmax(1)
    weight = torch.rand(n, generator=rng, dtype=torch.float64) + 0.1
    y.requires_grad_()
    squared = (y[:, None] - y[near]).square().sum(-1)
    (weight[:, None] * p * torch.log1p(squared / squared_width)).sum().div(weight.sum()).backward()
    torch.testing.assert_close(attraction_gradient(y.detach(), near, p, weight, squared_width), y.grad)


@settings(max_examples=40)
@given(layout=layouts(), n_rows=st.integers(1, 30), pairs=st.sampled_from([1, PAIRS]))
def test_repulsion_is_the_gradient_of_its_objective(layout, n_rows, pairs):
    y, rng, squared_width = layout
    rows = torch.randperm(len(y), generator=rng)[:n_rows]
    weight = torch.rand(len(y), generator=rng, dtype=torch.float64) + 0.1
    y.requires_grad_()
    kernel = 1 / (1 + (y[rows, None] - y).square().sum(-1) / squared_width)
    others = weight * (torch.arange(len(y)) != rows[:, None])
    ((kernel * others).sum(1).log() @ weight[rows]).div(weight[rows].sum()).backward()
    with mock.patch("alphastomics.sampling._layout.PAIRS", pairs):
        found = repulsion_gradient(y.detach(), rows, weight, squared_width)
    torch.testing.assert_close(found, y.grad, rtol=1e-6, atol=1e-9)


def test_a_mean_that_is_nearly_exact_is_kept(folded):
    _, mean, feature = folded

    def moved(unexplained: float) -> float:
        return float((refine_layout(mean, feature, generator(), unexplained=unexplained) - mean).square().mean())

    assert moved(0.0) < moved(0.02) < moved(0.2) < moved(1.0)


def test_weights_leave_other_cells_in_the_layout_without_over_represented_cells():
    """A tenth of the cells of a tissue, alone and with the other cells of its left part."""
    true = torch.rand(3000, 2, generator=generator()) * 2 - 1
    waves = torch.randn(2, 32, generator=generator(1)) * 2
    feature = F.normalize(torch.cat([(true @ waves).sin(), (true @ waves).cos()], dim=1), dim=1)
    mean = true + 0.3 * torch.randn(true.shape, generator=generator(2))
    tenth, left = torch.arange(len(true)) % 10 == 0, true[:, 0] < -0.5
    query = tenth | left
    expected = refine_layout(mean[tenth], feature[tenth], generator())

    def error(weight: torch.Tensor | None) -> float:
        refined = refine_layout(mean[query], feature[query], generator(), weight=weight)
        return float((refined[tenth[query]] - expected).square().sum(1).mean())

    assert error(torch.where(left, 0.1, 1.0)[query]) < 0.5 * error(None)


@pytest.mark.slow  # the search is compiled
def test_the_search_finds_the_nearest_cells_of_the_embedding(folded):
    feature = folded[2].clone()
    feature[:20] = feature[0]  # more cells than are searched have the same embedding
    found, similarity = _search(feature, 10)
    wanted, expected = _compare(feature, 10)
    assert found.shape == similarity.shape == (600, 10)
    assert not (found == torch.arange(600)[:, None]).any()
    torch.testing.assert_close(similarity, (feature[:, None] * feature[found]).sum(-1), atol=1e-5, rtol=0)
    assert (similarity >= expected - 1e-5).float().mean() > 0.99
    assert torch.equal(found[:, 0][20:], wanted[:, 0][20:])


@pytest.mark.slow
def test_the_search_keeps_the_number_of_threads():
    code = """
import torch
from alphastomics.sampling._layout import _search

torch.set_num_threads(1)
_search(torch.nn.functional.normalize(torch.randn(3000, 16), dim=1), 10)
assert torch.get_num_threads() == 1
"""
    environment = {**os.environ, "NUMBA_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)


@pytest.mark.slow
def test_a_large_slice_is_searched(folded, monkeypatch):
    true, mean, feature = folded
    compared = refine_layout(mean, feature, generator())
    monkeypatch.setattr("alphastomics.sampling._layout.N_COMPARED", 599)
    monkeypatch.delattr("alphastomics.sampling._layout._compare")
    torch.testing.assert_close(refine_layout(mean, feature, generator()), compared, atol=2e-3, rtol=0)
