"""Score of the placement of cells that a network has not seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphastomics.data import AnnDataSource
from alphastomics.sampling._held_out_score import LEAST, compare, score_held_out
from alphastomics.sampling._position import PositionSampler


def odds(true: np.ndarray, position: np.ndarray) -> float:
    return compare(true, position).log_odds


@pytest.fixture
def source(trained):
    return AnnDataSource(trained.adata, trained.schema, positions=True)


def test_the_placement_is_compared_with_the_truth(trained, source, monkeypatch):
    cells = source.slices[0]
    true = cells.position / source.schema.scale
    given = {"position": true}
    monkeypatch.setattr(PositionSampler, "place", lambda self, rng, *, refine: torch.from_numpy(given["position"]))
    sampler = trained._make_sampler()
    found = score_held_out(sampler, source, [cells])
    assert found == compare(true, true)
    n = len(true)
    assert found.to_dict() == {
        "n_scored": n, "knn_preservation": 1.0, "distance_spearman": pytest.approx(1.0), "contact_precision": 1.0,
        "knn_preservation_chance": 20 / (n - 1), "contact_precision_chance": 0.05,
    }  # fmt: skip
    given["position"] = np.full_like(true, np.nan)
    diverged = score_held_out(sampler, source, [cells])
    assert diverged.log_odds == -np.inf
    assert diverged.to_dict() is None


def test_too_few_cells_have_no_score(trained, source):
    cells, sampler = source.slices[0], trained._make_sampler()
    few = cells._replace(rows=cells.rows[:5], position=cells.position[:5])
    for held_out in ([few], []):
        assert score_held_out(sampler, source, held_out) is None


def test_the_score_of_the_truth_is_highest_and_that_of_chance_is_finite():
    rng = np.random.default_rng(0)
    true = rng.standard_normal((300, 2))
    best = 3 * np.log(1 / LEAST - 1)
    assert odds(true, 3 * true) == pytest.approx(best)
    near, chance = odds(true, true + 0.1 * rng.standard_normal((300, 2))), odds(true, rng.permutation(true))
    assert best > near > chance > -best
