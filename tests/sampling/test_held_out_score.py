"""Score of the placement of cells that a network has not seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphastomics.data import AnnDataSource
from alphastomics.sampling._held_out_score import LEAST, log_odds, score_held_out
from alphastomics.sampling._position import PositionSampler


@pytest.fixture
def source(trained):
    return AnnDataSource(trained.adata, trained.schema, positions=True)


def test_the_placement_is_compared_with_the_truth(trained, source, monkeypatch):
    cells = source.slices[0]
    true = cells.position / source.schema.scale
    given = {"position": true}
    monkeypatch.setattr(PositionSampler, "place", lambda self, rng, *, refine: torch.from_numpy(given["position"]))
    assert score_held_out(trained._make_sampler(), source, [cells]) == log_odds(true, true)
    given["position"] = np.full_like(true, np.nan)
    assert score_held_out(trained._make_sampler(), source, [cells]) == -np.inf


def test_too_few_cells_have_no_score(trained, source):
    cells, sampler = source.slices[0], trained._make_sampler()
    few = cells._replace(rows=cells.rows[:5], position=cells.position[:5])
    for held_out in ([few], []):
        assert score_held_out(sampler, source, held_out) is None


def test_the_score_of_the_truth_is_highest_and_that_of_chance_is_finite():
    rng = np.random.default_rng(0)
    true = rng.standard_normal((300, 2))
    best = 3 * np.log(1 / LEAST - 1)
    assert log_odds(true, 3 * true) == pytest.approx(best)
    near, chance = log_odds(true, true + 0.1 * rng.standard_normal((300, 2))), log_odds(true, rng.permutation(true))
    assert best > near > chance > -best
