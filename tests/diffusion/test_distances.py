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
def test_values_and_gradients_match_dense_arithmetic(kind, clamp, n_dims):
    predicted, true, mask = cells(n_dims=n_dims)
    value, gradient = value_and_gradient(lambda x: distance_loss(x, true, mask, kind=kind, clamp=clamp), predicted)
    for b, real in enumerate(mask):
        x, y = predicted[b, real], true[b, real]
        expected, slope = value_and_gradient(lambda x, y=y: dense(x, y, kind, clamp), x)
        assert abs(float(value[b] - expected)) < 1e-12
        assert float((gradient[b, real] - (b + 1) * slope).abs().max()) < 1e-12
        assert not bool(gradient[b, ~real].any())


@every_kind
def test_gradients_match_finite_differences(kind, clamp):
    predicted, true, mask = cells(1)
    assert torch.autograd.gradcheck(
        lambda x: distance_loss(x, true, mask, kind=kind, clamp=clamp), predicted.requires_grad_()
    )


@every_sampled_kind
def test_gradients_of_samples_match_finite_differences(kind, clamp):
    predicted, true, mask = cells(2)

    def loss(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return distance_loss(x, true, mask, kind=kind, clamp=clamp, n_pairs=40, generator=generator)

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
@pytest.mark.parametrize("entries", [1, 100, 10_000])
def test_blocks_of_rows_change_nothing(kind, clamp, entries, monkeypatch):
    predicted, true, mask = cells(3)
    loss = lambda x: distance_loss(x, true, mask, kind=kind, clamp=clamp)
    expected = value_and_gradient(loss, predicted)
    monkeypatch.setattr(distances, "ENTRIES", entries)
    torch.testing.assert_close(value_and_gradient(loss, predicted), expected, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("n_pairs", [None, 5000])
def test_nothing_is_kept_but_the_gradient(n_pairs):
    predicted, true, mask = torch.randn(1, 300, 2, requires_grad=True), torch.randn(1, 300, 2), torch.ones(1, 300) > 0
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        distance_loss(predicted, true, mask, n_pairs=n_pairs)
    assert max(sizes) == predicted.numel()


def test_a_second_derivative_raises():
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


def repeated_losses(kind: str, clamp: float | None, *, n_pairs: int) -> tuple[Tensor, Tensor]:
    """Losses of as many samples of one context, (2000,), with their gradients (2000, N, D) joined to them; and the exact ones."""
    predicted, true, mask = (x[:1] for x in cells(5, sizes=(20,)))
    exact = value_and_gradient(lambda x: distance_loss(x, true, mask, kind=kind, clamp=clamp), predicted)
    many = predicted.expand(DRAWS, -1, -1).clone().requires_grad_()
    arguments = (true.expand(DRAWS, -1, -1), mask.expand(DRAWS, -1))
    options = {"n_pairs": n_pairs, "generator": torch.Generator().manual_seed(1)}
    value = distance_loss(many, *arguments, kind=kind, clamp=clamp, **options)
    (gradient,) = torch.autograd.grad(value.sum(), many)
    sampled = torch.cat([value.detach()[:, None], gradient.flatten(1)], dim=1)
    return sampled, torch.cat([exact[0], exact[1].flatten()])


@every_sampled_kind
def test_samples_are_unbiased(kind, clamp):
    sampled, exact = repeated_losses(kind, clamp, n_pairs=30)
    error = sampled.std(dim=0) / DRAWS**0.5
    z = (sampled.mean(dim=0) - exact) / error.clamp_min(1e-12)
    assert float(error[0]) > 0
    assert abs(float(z[0])) <= 3
    assert float(z[1:].square().mean()) < 2  # of the gradient; its entries hang together


def test_samples_are_of_different_real_cells_drawn_uniformly():
    _, _, mask = cells(6, sizes=(6, 4, 1))
    n_pairs = 100_000
    i, j, weight = draw_pairs(mask, n_pairs, generator=torch.Generator().manual_seed(0))
    assert i.shape == j.shape == weight.shape == (3, n_pairs)
    assert not bool(weight[2].any())
    for b, n in enumerate((6, 4)):
        assert bool(mask[b, i[b]].all() & mask[b, j[b]].all())
        assert bool((i[b] != j[b]).all())
        share = torch.zeros(mask.shape[1], mask.shape[1], dtype=weight.dtype)
        share.index_put_((i[b], j[b]), weight[b], accumulate=True)
        real = mask[b, :, None] & mask[b] & ~torch.eye(mask.shape[1], dtype=torch.bool)
        np.testing.assert_allclose(share[real], 1 / (n * (n - 1)), rtol=0.1)


def test_a_generator_decides_the_sample():
    predicted, true, mask = cells(11)
    first, same, other = (
        distance_loss(predicted, true, mask, n_pairs=9, generator=torch.Generator().manual_seed(seed))
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
        ({"kind": "clamped"}, "clamp"),
        ({"kind": "huber", "clamp": 0.0}, "clamp"),
        ({"clamp": 1.0}, "clamp=1.0"),
        ({"kind": "drmsd", "n_pairs": 9}, "n_pairs=9"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        distance_loss(*cells(), **options)
