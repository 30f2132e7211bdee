"""Frames of ordered chains: motions, hand, gaps, points that meet."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy.spatial.transform import Rotation

from alphastomics.chains import synthetic_chains
from alphastomics.chains.fape import chain_frames, fape

seeds = st.integers(0, 10_000)


def generated(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions in Å, mask and places of a chain whose rows are shuffled, with two padded rows."""
    adata = synthetic_chains(n_chains=1, random_state=seed)
    x = torch.from_numpy(adata.obsm["spatial"])[None]
    index = torch.tensor(adata.obs["residue"].to_numpy(copy=True))[None]
    mask = torch.ones(1, x.shape[1] + 2, dtype=torch.bool)
    mask[:, -2:] = False
    padding = torch.full((1, 2, 3), float("nan"), dtype=x.dtype)
    return torch.cat([x, padding], 1), mask, torch.cat([index, index.new_zeros(1, 2)], 1)


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_frames_are_rotations_at_all_residues_but_the_ends(seed):
    x, mask, index = generated(seed)
    axes, found = chain_frames(x, mask, index=index)
    last = int(index.max())
    assert torch.equal(found, mask & (index > 0) & (index < last))
    identity = torch.eye(3, dtype=x.dtype).expand_as(axes)
    torch.testing.assert_close(axes.mT @ axes, identity)
    torch.testing.assert_close(torch.linalg.det(axes), torch.ones_like(axes[..., 0, 0]))
    torch.testing.assert_close(axes[~found], identity[~found])


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_frames_move_along_with_the_chain(seed):
    x, mask, index = generated(seed)
    turn = torch.from_numpy(Rotation.random(random_state=seed).as_matrix())
    axes, found = chain_frames(x, mask, index=index)
    moved, found_moved = chain_frames(x @ turn.T + 40, mask, index=index)
    assert torch.equal(found, found_moved)
    torch.testing.assert_close(moved[found], turn @ axes[found])


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_the_order_of_rows_changes_no_frame_of_a_residue(seed):
    x, mask, index = generated(seed)
    by_place = index[0, :-2].argsort()
    axes, found = chain_frames(x, mask, index=index)
    plain = chain_frames(x[:, by_place], mask[:, by_place])
    torch.testing.assert_close(axes[:, by_place], plain.axes)
    assert torch.equal(found[:, by_place], plain.mask)


@pytest.mark.parametrize("place", [0, 4, 8])
def test_two_residues_in_one_place_leave_the_gradient_finite(place):
    x = torch.from_numpy(synthetic_chains(n_chains=1).obsm["spatial"])[None, :10].clone()
    true, mask = x.clone(), torch.ones(1, 10, dtype=torch.bool)
    x[:, place + 1] = x[:, place]
    x.requires_grad_()
    frames, seen = chain_frames(x, mask), chain_frames(true, mask)
    assert bool(frames.axes.isfinite().all())
    value = fape(x, true, mask, frames.axes, seen.axes, clamp=1e3, scale=10.0, frame_mask=seen.mask)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert bool(gradient.isfinite().all())
    assert float(gradient.abs().max()) > 0


@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_a_generated_fold_differs_from_its_mirror_image(seed):
    x, mask, index = generated(seed)
    axes, found = chain_frames(x, mask, index=index)
    turn = torch.from_numpy(Rotation.random(random_state=seed).as_matrix())
    for sign, bound in ((1, 1e-4), (-1, -0.05)):
        copy = (x * torch.tensor([1, 1, sign])) @ turn.T + 9
        other = chain_frames(copy, mask, index=index).axes
        value = float(fape(copy, x, mask, other, axes, clamp=10.0, scale=10.0, frame_mask=found))
        assert value < bound if sign > 0 else value > -bound
