"""New slices: a smoothed bootstrap of reference cells, whose expression is noised and denoised."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial import KDTree
from scipy.stats import ks_2samp, kstest

from alphastomics.config import SamplingConfig
from alphastomics.data import local_density
from alphastomics.sampling import ExpressionSampler, Sampler, _joint
from alphastomics.sampling._draws import draw_generator
from alphastomics.sampling._joint import draw_cells
from alphastomics.sampling._reference_cells import ReferenceCells

SPACING = 0.1


@pytest.fixture
def grids() -> ReferenceCells:
    """Two slices of 400 cells, far from each other, on grids of one spacing."""
    axis = SPACING * np.arange(20, dtype=np.float32)
    grid = np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)
    position = np.concatenate([grid, grid + 100])
    return ReferenceCells(
        position=position,
        slice=np.repeat(np.arange(2, dtype=np.float32), 400),
        feature=np.zeros((800, 0), np.float32),
        cell_feature=np.zeros((800, 0), np.float32),
        expression=np.arange(800, dtype=np.float32)[:, None],
        sequence=np.random.default_rng(1).permutation(800).astype(np.float32),
    )


@pytest.mark.parametrize(("n_cells", "repeats"), [(300, False), (400, False), (900, True)])
def test_cells_of_one_slice_are_drawn_and_moved_by_about_a_spacing(grids, n_cells, repeats):
    rows, position = draw_cells(grids, n_cells, np.random.default_rng(0))
    assert len(np.unique(grids.slice[rows])) == 1
    assert (len(np.unique(rows)) < n_cells) == repeats
    noise = (position - grids.position[rows]) / SPACING
    assert kstest(noise.ravel(), "norm").pvalue > 1e-3


def test_every_slice_is_drawn_equally_often(grids):
    first = [grids.slice[draw_cells(grids, 1, np.random.default_rng(seed))[0][0]] for seed in range(400)]
    assert np.mean(first) == pytest.approx(0.5, abs=4 * 0.5 / 20)


def test_cells_are_drawn_in_their_sequence_on_request(grids):
    ordered, rows = (draw_cells(grids, 300, np.random.default_rng(0), in_order=o)[0] for o in (True, False))
    assert sorted(ordered) == sorted(rows)
    assert (np.diff(grids.sequence[ordered]) > 0).all()


def test_a_slice_with_one_stored_cell_is_drawn():
    one = np.zeros((1, 2), np.float32)
    cells = ReferenceCells(
        position=one, slice=one[:, 0], feature=one[:, :0], cell_feature=one[:, :0], expression=one, sequence=one[:, 0]
    )
    rows, position = draw_cells(cells, 3, np.random.default_rng(0))
    assert (rows.tolist(), position.tolist()) == ([0, 0, 0], [[0.0, 0.0]] * 3)


@pytest.fixture
def drawn(everything, monkeypatch):
    """Canonical positions (N, D) and expression (N, G) in network units of a sampled slice, and its stored cells."""

    def draw(n_cells, **arguments):
        seen = {}
        real_cells, real_decode = _joint.draw_cells, Sampler.decode_draw

        def recorded_cells(*args, **kwargs):
            seen["rows"], position = real_cells(*args, **kwargs)
            return seen["rows"], position

        def recorded_decode(sampler, x, *args):
            seen["expression"] = x.copy()
            return real_decode(sampler, x, *args)

        monkeypatch.setattr(_joint, "draw_cells", recorded_cells)
        monkeypatch.setattr(Sampler, "decode_draw", recorded_decode)
        result = everything.sample(mode="joint", n_cells=n_cells, **({"n_steps": 8} | arguments))
        frame = everything.fitted_.frame
        position = (result.obsm["spatial"] - np.asarray(frame.centroid)) / everything.schema.scale
        return position @ np.asarray(frame.rotation).T, seen["expression"], seen["rows"]

    return draw


def nearest_distances(position):
    return KDTree(position).query(position, 2)[0][:, 1]


@pytest.mark.parametrize("n_cells", [300, 700])
def test_a_sampled_slice_covers_a_reference_slice_with_its_spacing(everything, drawn, n_cells):
    position, _, rows = drawn(n_cells)
    cells, nearest = everything.fitted_.reference_cells, everything.fitted_.nearest
    stored = cells.position[cells.slice == cells.slice[rows[0]]]
    spacing = np.median(nearest_distances(stored))
    for a, b in ((position, stored), (stored, position)):
        assert np.quantile(KDTree(a).query(b)[0], 0.99) < 3 * spacing
    expected = nearest.of_cells(n_cells, 2)
    found = nearest_distances(position)
    assert np.median(found) == pytest.approx(np.median(expected), rel=0.15)
    assert ks_2samp(found, expected).statistic < 0.25
    assert np.linalg.norm(position - cells.position[rows], axis=1).min() > 0


def test_expression_resembles_the_drawn_cells_and_copies_none(everything, drawn):
    _, expression, rows = drawn(300)
    stored = everything.fitted_.reference_cells.expression
    distance = np.linalg.norm(expression[:, None] - stored, axis=2)
    own = distance[np.arange(300), rows]
    assert distance.min() > 0.05 * np.median(distance)
    assert own.mean() < 0.95 * distance[np.arange(300), np.random.default_rng(0).permutation(rows)].mean()


def test_at_a_small_start_time_the_drawn_cells_are_returned(everything, drawn, monkeypatch):
    monkeypatch.setattr(_joint, "START_TIME", 1e-3)
    _, expression, rows = drawn(300)
    stored = everything.fitted_.reference_cells.expression[rows]
    assert np.sqrt(((expression - stored) ** 2).mean()) < 0.1 * stored.std()


def test_a_start_at_pure_noise_is_a_sample_of_expression_at_the_positions(everything, drawn, monkeypatch):
    monkeypatch.setattr(_joint, "START_TIME", 1.0)
    seen = []
    real = _joint.remove_overlaps
    monkeypatch.setattr(_joint, "remove_overlaps", lambda *args: seen.append(real(*args)) or seen[-1])
    _, expression, _ = drawn(150, random_state=5)
    sampler = everything._make_sampler()
    at_positions = ExpressionSampler(
        sampler,
        torch.from_numpy(seen[0]).float(),
        max_context=1000,
        local_density=torch.from_numpy(local_density(seen[0])),
    )
    config = SamplingConfig(mode="joint", n_cells=150, n_steps=8)
    np.testing.assert_array_equal(expression, at_positions.sample(config, draw_generator(5, 0)).numpy())


def test_a_draw_does_not_depend_on_the_number_of_draws(everything):
    one, two = (everything.sample(mode="joint", n_cells=40, n_steps=2, n_samples=n) for n in (1, 2))
    np.testing.assert_array_equal(two.obsm["spatial"][:40], one.obsm["spatial"])
    np.testing.assert_array_equal(two.X[:40].toarray(), one.X.toarray())
