"""The frame-aligned point error against double loops over pairs, and frames along chains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.spatial.transform import Rotation

from alphastomics.chains import fape as module
from alphastomics.chains.fape import chain_frames, fape
from largest_tensor import LargestTensor

SIZES = (9, 6, 1)
seeds = st.integers(0, 10_000)


def chains(seed: int = 0, sizes: tuple[int, ...] = SIZES, n_dims: int = 3) -> tuple[torch.Tensor, ...]:
    """Predicted and true random walks in double precision, with NaN where padded, and the mask."""
    generator = torch.Generator().manual_seed(seed)
    walks = torch.randn(2, len(sizes), max(sizes), n_dims, generator=generator, dtype=torch.float64).cumsum(2) / 2
    mask = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
    predicted, true = walks.masked_fill(~mask[..., None], float("nan"))
    return predicted, true, mask


def random_frames(seed: int, mask: torch.Tensor, n_dims: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(*mask.shape, n_dims, n_dims, generator=generator, dtype=torch.float64))[0]


def double_loop(x_hat, x, r_hat, r, seen, clamp: float, scale: float) -> float:
    errors = [
        min(np.linalg.norm(r_hat[i].T @ (x_hat[j] - x_hat[i]) - r[i].T @ (x[j] - x[i])), clamp)
        for i in range(len(x))
        for j in range(len(x))
        if i != j and seen[i]
    ]
    return sum(errors) / max(1, len(errors)) / scale


def helix(n: int = 60) -> torch.Tensor:
    """The alpha carbons of a helix: 100 degrees and 1.5 Å per residue at a radius of 2.3 Å, over 10 Å."""
    angle = torch.arange(n) * np.radians(100)
    return torch.stack([2.3 * angle.cos(), 2.3 * angle.sin(), 1.5 * torch.arange(n)], dim=1)[None] / 10


def chain_fape(predicted, true, mask, *, clamp: float = 1.0) -> torch.Tensor:
    seen, found = chain_frames(true, mask), chain_frames(predicted, mask)
    return fape(predicted, true, mask, found.axes, seen.axes, clamp=clamp, scale=1.0, frame_mask=seen.mask)


@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("all_seen", [True, False])
def test_values_match_double_loops(n_dims, all_seen):
    predicted, true, mask = chains(n_dims=n_dims)
    frames = random_frames(1, mask, n_dims), random_frames(2, mask, n_dims)
    some = torch.rand(mask.shape, generator=torch.Generator().manual_seed(3)) < 0.7
    seen = None if all_seen else some
    actual = fape(predicted, true, mask, *frames, clamp=1.2, scale=0.8, frame_mask=seen)
    for b, n in enumerate(SIZES):
        arrays = (x[b, :n].numpy() for x in (predicted, true, *frames, mask if all_seen else some))
        assert float(actual[b]) == pytest.approx(double_loop(*arrays, 1.2, 0.8), abs=1e-9)


def test_gradients_match_finite_differences_also_through_the_frames():
    predicted, true, mask = chains(4, sizes=(6, 4))
    x = predicted.masked_fill(~mask[..., None], 0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: chain_fape(x, true, mask), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rigid_copy_costs_nothing_and_a_mirror_image_does(dtype):
    true = helix().to(dtype)
    mask = torch.ones(true.shape[:2]) > 0
    turn = torch.from_numpy(Rotation.random(random_state=0).as_matrix()).to(dtype)
    assert float(chain_fape(true @ turn + 5, true, mask)) < 1e-4
    assert float(chain_fape(true * torch.tensor([1, 1, -1]), true, mask)) > 0.05


@given(seed=seeds)
@settings(max_examples=20)
def test_motions_of_either_side_change_nothing(seed):
    predicted, true, mask = chains(seed)
    turns = [torch.from_numpy(Rotation.random(random_state=seed + k).as_matrix()) for k in range(2)]
    moved = chain_fape(predicted @ turns[0] - 3, true @ turns[1] + 8, mask)
    torch.testing.assert_close(moved, chain_fape(predicted, true, mask), rtol=1e-6, atol=1e-6)


@given(seed=seeds)
@settings(max_examples=20)
def test_neither_padding_nor_the_order_of_cells_changes_anything(seed):
    predicted, true, mask = chains(seed)
    order = torch.randperm(mask.shape[1], generator=torch.Generator().manual_seed(seed))
    index = torch.arange(mask.shape[1])[order].expand_as(mask)
    expected = chain_frames(true, mask)
    frames = [chain_frames(x[:, order], mask[:, order], index=index) for x in (predicted, true)]
    torch.testing.assert_close(frames[1].axes, expected.axes[:, order])
    assert torch.equal(frames[1].mask, expected.mask[:, order])
    shuffled = (x[:, order] for x in (predicted, true, mask))
    axes = (frame.axes for frame in frames)
    actual = fape(*shuffled, *axes, clamp=1.0, scale=1.0, frame_mask=frames[1].mask)
    torch.testing.assert_close(actual, chain_fape(predicted, true, mask))
    alone = chain_fape(predicted[1:2, : SIZES[1]], true[1:2, : SIZES[1]], mask[1:2, : SIZES[1]])
    torch.testing.assert_close(actual[1:2], alone)


@pytest.mark.parametrize("case", ["perfect", "one place", "no frame", "no cell"])
def test_gradients_are_finite_where_formulas_divide_by_zero(case):
    predicted, true, mask = chains(5, sizes=(7,))
    if case == "perfect":
        predicted = true.clone()
    elif case == "one place":
        predicted = torch.ones_like(true)
    elif case == "no frame":
        true = torch.arange(7.0, dtype=torch.float64)[None, :, None].expand_as(true)
    else:
        mask = mask & False
    predicted.requires_grad_()
    value = chain_fape(predicted, true, mask)
    (gradient,) = torch.autograd.grad(value.sum(), predicted)
    assert bool(gradient.isfinite().all())
    assert (float(value.detach()) == pytest.approx(0, abs=1e-5)) == (case != "one place")


def test_frames_match_the_formula():
    _, x, mask = chains(6)
    axes, found = chain_frames(x, mask)
    for b, n in enumerate(SIZES):
        np.testing.assert_array_equal(found[b], [0 < i < n - 1 for i in range(max(SIZES))])
        points = x[b].numpy()
        for i in range(1, n - 1):
            e_1 = (points[i + 1] - points[i]) / np.linalg.norm(points[i + 1] - points[i])
            u = points[i - 1] - points[i]
            e_2 = (u - (u @ e_1) * e_1) / np.linalg.norm(u - (u @ e_1) * e_1)
            np.testing.assert_allclose(axes[b, i], np.stack([e_1, e_2, np.cross(e_1, e_2)], axis=1), atol=1e-12)
    np.testing.assert_array_equal(axes[~found], np.eye(3)[None].repeat(int((~found).sum()), axis=0))


def test_a_chain_has_no_frames_beside_a_gap_and_where_it_is_straight():
    x = helix(8).double()
    x[0, 5] = 2 * x[0, 4] - x[0, 3]
    mask = torch.ones(1, 8) > 0
    assert chain_frames(x, mask).mask[0].tolist() == [False, True, True, True, False, True, True, False]
    index = torch.tensor([[0, 1, 2, 3, 5, 6, 7, 8]])
    assert chain_frames(helix(8), mask, index=index).mask[0].tolist() == [False, True, True, False, False, True, True, False]  # fmt: skip


def test_blocks_change_nothing_and_the_pairs_are_never_all_in_memory(monkeypatch):
    n, rows = 100, 7
    true = torch.randn(2, n, 3, dtype=torch.float64).cumsum(1) / 5
    predicted, mask = (true + 0.1 * torch.randn_like(true)).requires_grad_(), torch.ones(2, n) > 0
    whole = chain_fape(predicted, true, mask)
    expected = whole.detach(), *torch.autograd.grad(whole.sum(), predicted)
    monkeypatch.setattr(module, "ENTRIES", rows * true.numel())
    saved: list[int] = []
    with (
        LargestTensor() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x),
    ):
        value = chain_fape(predicted, true, mask)
        gradient = torch.autograd.grad(value.sum(), predicted)
    torch.testing.assert_close((value.detach(), *gradient), expected)
    assert rows * true.numel() <= largest.entries <= 2 * rows * true.numel()
    assert max(saved) <= 3 * true.numel()


def test_autocast_changes_nothing():
    predicted, true, mask = (x.float() if x.is_floating_point() else x for x in chains(7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = chain_fape(predicted, true, mask)
    torch.testing.assert_close(actual, chain_fape(predicted, true, mask))


def test_invalid_options_raise():
    predicted, true, mask = chains()
    frames = random_frames(0, mask, 3)
    for lengths in ({"clamp": 0.0, "scale": 1.0}, {"clamp": 1.0, "scale": -1.0}):
        with pytest.raises(ValueError, match="clamp.*scale"):
            fape(predicted, true, mask, frames, frames, **lengths)
    with pytest.raises(ValueError, match="3 dim"):
        chain_frames(predicted[..., :2], mask)
