"""Losses of distances against dense float64 arithmetic: values, gradients, samples, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.spatial import KDTree

from alphastomics.diffusion import distances
from alphastomics.diffusion.distances import distance_loss, draw_pairs, pairwise_distances

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

TAU = 0.7
KINDS = {"mse": None, "drmsd": None, "clamped": TAU, "huber": TAU}
SAMPLED = {kind: clamp for kind, clamp in KINDS.items() if kind != "drmsd"}
every_kind = pytest.mark.parametrize(("kind", "clamp"), KINDS.items(), ids=KINDS)
every_sampled_kind = pytest.mark.parametrize(("kind", "clamp"), SAMPLED.items(), ids=SAMPLED)
seeds = st.integers(0, 10_000)


def cells(seed: int = 0, sizes: tuple[int, ...] = (13, 8, 2), n_dims: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Predicted and true positions in double precision, and a mask with its holes anywhere."""
    generator = torch.Generator().manual_seed(seed)
    n = max(sizes) + 1
    predicted, true = torch.randn(2, len(sizes), n, n_dims, generator=generator, dtype=torch.float64)
    ranks = torch.rand(len(sizes), n, generator=generator).argsort(dim=1)
    return predicted, true, ranks < torch.tensor(sizes)[:, None]


def nearest(true: Tensor, mask: Tensor, k: int) -> Tensor:
    """Numbers of the k nearest other real cells, (B, N, K), -1 for none."""
    neighbors = torch.full((*mask.shape, k), -1)
    for b, real in enumerate(mask):
        number = real.nonzero()[:, 0]
        distance = torch.linalg.norm(true[b, number][:, None] - true[b, number][None], dim=-1)
        distance.fill_diagonal_(float("inf"))
        found = number[distance.argsort(dim=1)[:, : min(k, len(number) - 1)]]
        neighbors[b, number, : found.shape[1]] = found
    return neighbors


def dense(predicted: Tensor, true: Tensor, kind: str, clamp: float | None) -> Tensor:
    """The loss of one context without padding, from the definition, for autograd."""
    i, j = torch.triu_indices(len(predicted), len(predicted), offset=1)
    r = (predicted[i] - predicted[j]).norm(dim=1) - (true[i] - true[j]).norm(dim=1)
    if kind == "clamped":
        return torch.where(r.abs() < clamp, r.abs(), clamp).mean()
    if kind == "huber":
        return torch.nn.functional.huber_loss(r, torch.zeros_like(r), delta=clamp)
    return (r**2).mean() if kind == "mse" else ((r**2).mean() + 1e-12).sqrt()


def value_and_gradient(loss: Callable[[Tensor], Tensor], predicted: Tensor) -> tuple[Tensor, Tensor]:
    predicted = predicted.clone().requires_grad_()
    value = loss(predicted)
    weight = torch.arange(1, value.numel() + 1, dtype=value.dtype).view_as(value)
    return value.detach(), torch.autograd.grad((weight * value).sum(), predicted)[0]


@every_kind
@pytest.mark.parametrize("n_dims", [2, 3])
def test_values_and_gradients_are_those_of_dense_arithmetic(kind, clamp, n_dims):
    predicted, true, mask = cells(n_dims=n_dims)
    value, gradient = value_and_gradient(lambda x: distance_loss(x, true, mask, kind=kind, clamp=clamp), predicted)
    for b, real in enumerate(mask):
        x, y = predicted[b, real], true[b, real]
        expected, slope = value_and_gradient(lambda x, y=y: dense(x, y, kind, clamp), x)
        assert abs(float(value[b] - expected)) < 1e-12
        assert float((gradient[b, real] - (b + 1) * slope).abs().max()) < 1e-12
        assert not bool(gradient[b, ~real].any())


@every_kind
def test_gradients_are_those_of_finite_differences(kind, clamp):
    predicted, true, mask = cells(1)
    assert torch.autograd.gradcheck(
        lambda x: distance_loss(x, true, mask, kind=kind, clamp=clamp), predicted.requires_grad_()
    )


@every_sampled_kind
@pytest.mark.parametrize("stratified", [False, True])
def test_gradients_of_samples_are_those_of_finite_differences(kind, clamp, stratified):
    predicted, true, mask = cells(2)
    neighbors = nearest(true, mask, 3) if stratified else None

    def loss(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        options = {"n_pairs": 40, "neighbors": neighbors, "generator": generator}
        return distance_loss(x, true, mask, kind=kind, clamp=clamp, pairs="sampled", **options)

    assert torch.autograd.gradcheck(loss, predicted.requires_grad_())


@every_kind
@pytest.mark.parametrize("case", ["perfect", "one place", "one cell", "no cell"])
def test_gradients_are_finite_where_formulas_divide_by_zero(kind, clamp, case):
    predicted, true, mask = (x[:1] for x in cells())
    if case == "perfect":
        predicted = true.clone()
    elif case == "one place":
        predicted = torch.ones_like(predicted)
    else:
        mask = mask & (mask.cumsum(1) <= int(case == "one cell"))
    value, gradient = value_and_gradient(lambda x: distance_loss(x, true, mask, kind=kind, clamp=clamp), predicted)
    assert bool(gradient.isfinite().all())
    assert (float(value) == pytest.approx(0, abs=2e-6)) == (case != "one place")
    if case != "perfect":
        assert not bool(gradient.any())


@pytest.mark.parametrize("n_dims", [2, 3])
def test_a_perfect_prediction_in_single_precision_has_no_gradient(n_dims):
    true = torch.randn(1, 200, n_dims)
    mask = torch.ones(1, 200) > 0
    for kind, clamp in KINDS.items():
        _, gradient = value_and_gradient(lambda x, k=kind, c=clamp: distance_loss(x, true, mask, kind=k, clamp=c), true)
        assert not bool(gradient.any())


@every_kind
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_nothing(kind, clamp, chunk):
    predicted, true, mask = cells(3)
    auto, chunked = (
        value_and_gradient(lambda x, s=s: distance_loss(x, true, mask, kind=kind, clamp=clamp, chunk=s), predicted)
        for s in ("auto", chunk)
    )
    torch.testing.assert_close(chunked, auto, rtol=1e-12, atol=1e-12)


@given(seed=seeds, kind=st.sampled_from(list(KINDS)), n_dims=st.sampled_from([2, 3]))
@settings(max_examples=25)
def test_neither_padding_nor_order_nor_motion_changes_anything(seed, kind, n_dims):
    predicted, true, mask = cells(seed, n_dims=n_dims)
    generator = torch.Generator().manual_seed(seed)
    turn, _ = torch.linalg.qr(torch.randn(n_dims, n_dims, generator=generator, dtype=torch.float64))
    order = torch.randperm(mask.shape[1], generator=generator)
    loss = lambda x, y, m: distance_loss(x, y, m, kind=kind, clamp=KINDS[kind])
    value, gradient = value_and_gradient(lambda x: loss(x, true, mask), predicted)
    moved = torch.where(mask[..., None], true @ turn + 4, float("nan"))
    rubbish = torch.where(mask[..., None], predicted, float("nan"))[:, order]
    actual = value_and_gradient(lambda x: loss(x, moved[:, order], mask[:, order]), rubbish)
    torch.testing.assert_close(actual, (value, gradient[:, order]), rtol=1e-9, atol=1e-9)


def test_autocast_and_half_precision_lose_no_digits():
    predicted, true, mask = (x.float() if x.is_floating_point() else x for x in cells())
    expected = distance_loss(predicted, true, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(distance_loss(predicted, true, mask), expected)
    rounded = predicted.bfloat16()
    actual = distance_loss(rounded, true, mask)
    torch.testing.assert_close(actual, distance_loss(rounded.float(), true, mask))
    assert value_and_gradient(lambda x: distance_loss(x, true, mask), rounded)[1].dtype == torch.bfloat16


@pytest.mark.parametrize("pairs", ["all", "sampled"])
def test_nothing_is_kept_but_the_gradient(pairs):
    predicted, true, mask = torch.randn(1, 300, 2, requires_grad=True), torch.randn(1, 300, 2), torch.ones(1, 300) > 0
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        distance_loss(predicted, true, mask, pairs=pairs, n_pairs=5000)
    assert max(sizes) == predicted.numel()


def test_a_second_derivative_is_refused():
    predicted, true, mask = cells()
    predicted.requires_grad_()
    value = distance_loss(predicted, true, mask).square().sum()
    (gradient,) = torch.autograd.grad(value, predicted, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()


MEASURE = """
import sys, torch
from alphastomics.diffusion.distances import distance_loss
n = int(sys.argv[1])
predicted, true = torch.randn(1, n, 2, requires_grad=True), torch.randn(1, n, 2)
distance_loss(predicted, true, torch.ones(1, n) > 0).sum().backward()
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def peak_megabytes(n_cells: int) -> float:
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(n_cells)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
    return int(result.stdout) / 1024


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")
def test_memory_is_flat():
    start = peak_megabytes(8)
    few, many = (peak_megabytes(n) - start for n in (4096, 16384))
    assert many <= 1.3 * few
    assert many < 100


DRAWS = 2000


def repeated_losses(kind: str, clamp: float | None, *, stratified: bool, n_pairs: int) -> tuple[Tensor, Tensor]:
    """Losses of as many samples of one context, (2000,), with their gradients (2000, N, D) joined to them; and the exact ones."""
    predicted, true, mask = (x[:1] for x in cells(5, sizes=(20,)))
    neighbors = nearest(true, mask, 3) if stratified else None
    exact = value_and_gradient(lambda x: distance_loss(x, true, mask, kind=kind, clamp=clamp), predicted)
    many = predicted.expand(DRAWS, -1, -1).clone().requires_grad_()
    options = {
        "pairs": "sampled",
        "n_pairs": n_pairs,
        "neighbors": None if neighbors is None else neighbors.expand(DRAWS, -1, -1),
        "generator": torch.Generator().manual_seed(1),
    }
    arguments = (true.expand(DRAWS, -1, -1), mask.expand(DRAWS, -1))
    value = distance_loss(many, *arguments, kind=kind, clamp=clamp, **options)
    (gradient,) = torch.autograd.grad(value.sum(), many)
    sampled = torch.cat([value.detach()[:, None], gradient.flatten(1)], dim=1)
    return sampled, torch.cat([exact[0], exact[1].flatten()])


@every_sampled_kind
@pytest.mark.parametrize("stratified", [False, True])
def test_samples_are_unbiased(kind, clamp, stratified):
    sampled, exact = repeated_losses(kind, clamp, stratified=stratified, n_pairs=30)
    error = sampled.std(dim=0) / DRAWS**0.5
    z = (sampled.mean(dim=0) - exact) / error.clamp_min(1e-12)
    assert float(error[0]) > 0
    assert abs(float(z[0])) <= 3
    assert float(z[1:].square().mean()) < 2  # of the gradient; its entries hang together


@pytest.mark.parametrize("stratified", [False, True])
def test_samples_are_of_different_real_cells_drawn_in_proportion_to_their_weight(stratified):
    _, true, mask = cells(6, sizes=(6, 4, 1))
    neighbors = nearest(true, mask, 2) if stratified else None
    n_pairs = 100_000
    i, j, weight = draw_pairs(mask, n_pairs, neighbors, generator=torch.Generator().manual_seed(0))
    assert i.shape == j.shape == weight.shape == (3, n_pairs)
    assert not bool(weight[2].any())
    for b, n in enumerate((6, 4)):
        assert bool(mask[b, i[b]].all() & mask[b, j[b]].all())
        assert bool((i[b] != j[b]).all())
        share = torch.zeros(mask.shape[1], mask.shape[1], dtype=weight.dtype)
        share.index_put_((i[b], j[b]), weight[b], accumulate=True)
        real = mask[b, :, None] & mask[b] & ~torch.eye(mask.shape[1], dtype=torch.bool)
        np.testing.assert_allclose(share[real], 1 / (n * (n - 1)), rtol=0.1)


def test_half_of_a_stratified_sample_are_edges():
    _, true, mask = cells(7, sizes=(400,))
    neighbors = nearest(true, mask, 4)
    i, j, _ = draw_pairs(mask, 4000, neighbors, generator=torch.Generator().manual_seed(0))
    near = (neighbors[0, i[0]] == j[0, :, None]).any(-1).double()
    assert float(near[2000:].mean()) == 1
    assert float(near[:2000].mean()) == pytest.approx(4 / 399, abs=0.01)


def test_edges_of_padding_and_of_a_cell_to_itself_are_never_drawn():
    _, _, mask = cells(8, sizes=(5,))
    n = mask.shape[1]
    neighbors = torch.arange(n).expand(1, n, n)
    i, j, weight = draw_pairs(mask, 2000, neighbors, generator=torch.Generator().manual_seed(0))
    assert bool((mask[0, i] & mask[0, j] & (i != j)).all())
    np.testing.assert_allclose(weight, 1 / 2000)  # every pair is an edge: both halves are uniform


def test_without_edges_the_uniform_half_decides():
    predicted, true, mask = cells(9, sizes=(12, 5))
    none = torch.full((*mask.shape, 3), -1)
    generator = torch.Generator().manual_seed(0)
    value = distance_loss(predicted, true, mask, pairs="sampled", n_pairs=200_000, neighbors=none, generator=generator)
    np.testing.assert_allclose(value, distance_loss(predicted, true, mask), rtol=0.02)


def test_edges_tell_more_of_what_is_near():
    """The mean of a function that is 1 for neighbors and 0 for other pairs, as estimated by 300 samples of each kind."""
    true = np.random.default_rng(0).normal(size=(500, 2))
    neighbors = torch.from_numpy(KDTree(true).query(true, 7)[1][:, 1:])
    mask, spread = torch.ones(300, 500) > 0, []
    for edges in (None, neighbors.expand(300, -1, -1)):
        i, j, weight = draw_pairs(mask, 2000, edges, generator=torch.Generator().manual_seed(0))
        estimate = (weight * (neighbors[i] == j[..., None]).any(-1)).sum(1)
        assert float(estimate.mean()) == pytest.approx(6 / 499, rel=0.05)
        spread.append(float(estimate.std()))
    assert spread[1] < 0.2 * spread[0]


def test_auto_draws_pairs_in_large_contexts_only(monkeypatch):
    predicted, true, mask = cells(10)
    monkeypatch.setattr(distances, "LARGEST_ALL", mask.shape[1])
    options = {"n_pairs": 7, "generator": torch.Generator().manual_seed(0)}
    exact = distance_loss(predicted, true, mask)
    torch.testing.assert_close(distance_loss(predicted, true, mask, pairs="auto", **options), exact)
    monkeypatch.setattr(distances, "LARGEST_ALL", mask.shape[1] - 1)
    assert not torch.allclose(distance_loss(predicted, true, mask, pairs="auto", **options), exact)
    root = distance_loss(predicted, true, mask, kind="drmsd", pairs="auto", **options)
    torch.testing.assert_close(root, exact.sqrt())


def test_a_generator_decides_the_sample():
    predicted, true, mask = cells(11)
    first, same, other = (
        distance_loss(predicted, true, mask, pairs="sampled", n_pairs=9, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@every_kind
def test_no_loss_of_distances_sees_a_mirror_image(kind, clamp):
    _, true, mask = cells(12, n_dims=3)
    mirrored = true * torch.tensor([-1.0, 1.0, 1.0])
    largest = float(distance_loss(mirrored, true, mask, kind=kind, clamp=clamp).max())
    assert largest < (2e-6 if kind == "drmsd" else 1e-12)  # one is the root of the other


def test_huber_pulls_beyond_its_threshold_and_the_clamped_loss_does_not():
    predicted, true, mask = torch.tensor([[[0.0], [5.0]]]), torch.tensor([[[0.0], [1.0]]]), torch.ones(1, 2) > 0
    for kind, expected in (("clamped", 0.0), ("huber", TAU)):
        _, gradient = value_and_gradient(lambda x, k=kind: distance_loss(x, true, mask, kind=k, clamp=TAU), predicted)
        np.testing.assert_allclose(gradient[0, :, 0], [-expected, expected])


def test_pairwise_distances_of_near_points_far_from_the_origin():
    x = torch.tensor([[[1000.0, 1000.0], [1000.25, 1000.0]]])
    np.testing.assert_array_equal(pairwise_distances(x, x)[0], [[0, 0.25], [0.25, 0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "fape"}, "kind='fape'"),
        ({"pairs": "some"}, "pairs='some'"),
        ({"kind": "clamped"}, "clamp"),
        ({"kind": "huber", "clamp": 0.0}, "clamp"),
        ({"clamp": 1.0}, "clamp=1.0"),
        ({"kind": "drmsd", "pairs": "sampled"}, "kind"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        distance_loss(*cells(), **options)
