"""Outlines of reference slices, and cells packed within them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial import KDTree
from scipy.stats import ks_2samp

from alphastomics.model import AlphaSTomics
from alphastomics.sampling._frames import Outlines


@pytest.fixture(params=[2, 3])
def clouds(request):
    """A box with sharp edges, and a draw that has tails instead."""
    rng = np.random.default_rng(0)
    shape = np.array([2.0, 1.0, 1.5])[: request.param]
    box = (shape * (2 * rng.random((3000, request.param)) - 1)).astype(np.float32)
    return box, (0.7 * shape * rng.standard_normal((2000, request.param))).astype(np.float32)


def test_a_draw_takes_the_outline_of_the_given_slice(clouds):
    box, draw = clouds
    outlines = Outlines.fit([box, 3 * box])
    moved = outlines.apply(draw, 0)
    direction = np.random.default_rng(1).standard_normal(box.shape[1])
    assert ks_2samp(moved @ direction, box @ direction).statistic < 0.04
    assert ks_2samp(draw @ direction, box @ direction).statistic > 0.06
    edge = np.abs(box).max(axis=0)
    outside = [(np.abs(x) > 1.05 * edge).mean() for x in (draw, moved)]
    assert outside[1] < 0.2 * outside[0]
    assert ks_2samp(outlines.apply(draw, 1) @ direction, 3 * box @ direction).statistic < 0.04


def test_mapping_keeps_neighbors_and_matching_outlines(clouds):
    box, draw = clouds
    outlines = Outlines.fit([box])
    moved = outlines.apply(draw, 0)
    near = KDTree(draw).query(draw, 2)[1][:, 1]
    far = np.random.default_rng(0).permutation(len(draw))
    apart = [np.median(np.linalg.norm(moved - moved[other], axis=1)) for other in (near, far)]
    assert apart[0] < 0.15 * apart[1]
    assert np.abs(outlines.apply(box, 0) - box).mean() < 0.02


def test_training_keeps_outlines_where_tissue_is_drawn(everything, trained, tmp_path):
    assert trained.fitted_.outlines is None
    assert everything.fitted_.outlines.quantiles.shape == (3, 8, 129)
    everything.save(tmp_path / "model")
    loaded = AlphaSTomics.load(tmp_path / "model", adata=False)
    np.testing.assert_array_equal(loaded.fitted_.outlines.quantiles, everything.fitted_.outlines.quantiles)


def test_drawn_tissue_has_the_outline_of_a_slice(everything, monkeypatch):
    """Before overlaps are removed, which moves cells by about one spacing."""
    monkeypatch.setattr("alphastomics.sampling._joint.remove_overlaps", lambda position, *_: position)
    drawn = everything.sample(mode="joint", n_cells=300, n_steps=4, random_state=0).obsm["spatial"]
    canonical = everything.fitted_.frame.rotation
    x = (drawn - drawn.mean(0)) / everything.schema.scale @ np.asarray(canonical).T
    targets = everything.fitted_.outlines.quantiles
    found = Outlines.fit([x.astype(np.float32)]).quantiles[0]
    centered = targets - targets.mean(axis=2, keepdims=True)
    assert min(np.abs(found - target).max() for target in centered) < 0.5
    assert torch.isfinite(torch.from_numpy(drawn)).all()
