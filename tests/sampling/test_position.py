"""Placements with known positions: what is kept, in which frame the others lie, and what they gain."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphastomics.metrics import aligned_rmsd
from alphastomics.sampling import PositionSampler, _position
from alphastomics.sampling._cells import EncodedCells, split_contexts
from alphastomics.sampling._overlap import NearestDistances
from alphastomics.sampling._position import KnownPositions
from alphastomics.sampling._sampler import FittedStatistics
from alphastomics.sampling._scale import rms_radius
from position_oracle import Oracle, sampler_of
from rotations import random_rotation

N_CELLS = 200


@pytest.fixture
def mean() -> torch.Tensor:
    return torch.rand(N_CELLS, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture
def known(mean) -> torch.Tensor:
    """Positions that differ from the mean smoothly, in another frame; those of every third cell are not known."""
    moved = mean + 0.3 * torch.stack([(2 * mean[:, 1]).sin(), mean[:, 0] * mean[:, 1]], dim=1)
    return moved @ random_rotation(2, torch.Generator().manual_seed(1)) + torch.tensor([5.0, -3.0])


def hidden(known: torch.Tensor) -> torch.Tensor:
    known = known.clone()
    known[::3] = torch.nan
    return known


def sampler_for(mean: torch.Tensor, frame: str = "slice", *, separate: bool = True) -> PositionSampler:
    fitted = FittedStatistics(nearest=NearestDistances.fit([mean.numpy()]) if separate else None)
    cells = EncodedCells(mean, torch.eye(len(mean)), split_contexts(len(mean), len(mean), mean.device))
    return PositionSampler(sampler_of(Oracle(2, rigid=False), frame, fitted=fitted), cells)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("frame", ["slice", "shared"])
@pytest.mark.parametrize("separate", [False, True])
def test_known_positions_do_not_change(mean, known, frame, separate):
    known = hidden(known)
    placed = sampler_for(mean, frame).place(rng(), refine=False, separate=separate, known=known)
    at = known.isfinite().all(1)
    torch.testing.assert_close(placed[at], known[at], atol=1e-5, rtol=0)
    assert bool(placed.isfinite().all())


@pytest.mark.parametrize("reflected", [False, True])
def test_rotated_known_positions_give_the_rotated_placement(mean, known, reflected):
    positions, known = sampler_for(mean), hidden(known)
    rotation = random_rotation(2, torch.Generator().manual_seed(2))
    if (torch.linalg.det(rotation) < 0) != reflected:
        rotation = rotation @ torch.diag(torch.tensor([1.0, -1.0]))
    expected = positions.place(rng(), refine=False, known=known) @ rotation - 7
    torch.testing.assert_close(
        positions.place(rng(), refine=False, known=known @ rotation - 7), expected, atol=1e-4, rtol=0
    )


def test_the_frame_of_the_known_cells_is_found(known):
    """With a conditional mean that is correct up to a rigid motion, nothing is left to predict."""
    cells = known @ random_rotation(2, torch.Generator().manual_seed(3)) + 1
    placed = sampler_for(cells, separate=False).place(rng(), refine=False, known=hidden(known))
    torch.testing.assert_close(placed, known, atol=1e-4, rtol=0)


def test_known_cells_correct_those_that_resemble_them(mean, known):
    placed = sampler_for(mean, separate=False).place(rng(), refine=False, known=hidden(known))
    rest = torch.arange(0, N_CELLS, 3)
    error = (placed - known)[rest].square().sum(1).mean().sqrt()
    assert float(error) < 0.4 * aligned_rmsd(known[rest].numpy(), mean[rest].numpy())


def test_a_shared_frame_is_not_moved(mean):
    known = mean + 4.0
    known[3:] = torch.nan  # too few to estimate a shift
    placed = sampler_for(mean, "shared", separate=False).place(rng(), refine=False, known=known)
    torch.testing.assert_close(placed[3:], mean[3:])


@pytest.mark.parametrize("n_known", [1, 2, 3, N_CELLS])
def test_a_rigid_motion_keeps_distances_and_is_undone(mean, known, n_known):
    known[n_known:] = torch.nan
    frame = KnownPositions(known, mean, shared_frame=False)
    assert frame.mask.sum() == n_known
    found, given = (torch.cdist(x.double(), x.double()) for x in (frame.position, known[:n_known]))
    torch.testing.assert_close(found, given, atol=1e-5, rtol=0)
    torch.testing.assert_close(frame.position.mean(0), mean[:n_known].mean(0))
    torch.testing.assert_close(frame.to_user_frame(frame.position), known[:n_known], atol=1e-5, rtol=0)


def test_without_statistics_of_a_reference_a_placement_is_the_mean(mean):
    positions = sampler_for(mean, "shared", separate=False)
    torch.testing.assert_close(positions.place(rng(), refine=False), positions.mean[0])


def test_a_layout_has_the_radius_of_the_reference_unless_its_frame_is_shared(mean):
    for frame in ("slice", "shared"):
        positions = sampler_for(mean, frame)
        positions.mean = 0.2 * positions.mean
        found = rms_radius(positions.place(rng(), refine=False))
        assert (found > 0.9 * rms_radius(mean)) == (frame == "slice")


def test_a_layout_is_refined_by_both_embeddings(mean, monkeypatch):
    found = []
    monkeypatch.setattr(_position, "refine_layout", lambda x, feature, *_, **__: found.append(feature) or x)
    positions = sampler_for(mean, separate=False)
    positions.feature = torch.nn.functional.normalize(mean, dim=1)
    positions.place(rng(), refine=True)
    similarity = positions.feature @ positions.feature.T + positions.cell_feature @ positions.cell_feature.T
    torch.testing.assert_close(found[0] @ found[0].T, similarity / 2)


def test_a_layout_is_refined_around_kriged_positions_with_their_unexplained_share(mean, monkeypatch):
    kriged, shares = mean + 1, []
    monkeypatch.setattr(_position, "krige_positions", lambda *_: (kriged, 0.25))
    monkeypatch.setattr(
        _position, "refine_layout", lambda x, *_, unexplained, **__: shares.append(unexplained) or torch.zeros_like(x)
    )
    known = torch.full_like(mean, torch.nan)
    known[:20] = mean[:20]
    positions = sampler_for(mean, "shared", separate=False)
    positions.feature = torch.nn.functional.normalize(mean, dim=1)
    found = positions.place(rng(), refine=True, known=known)
    torch.testing.assert_close(found[:20], mean[:20])
    assert bool((found[20:] == 0).all())
    torch.testing.assert_close(positions.place(rng(), refine=False, known=known)[20:], kriged[20:])
    positions.place(rng(), refine=True)
    assert shares == [0.25, 1.0]
