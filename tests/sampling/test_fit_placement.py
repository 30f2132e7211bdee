"""Weight of retrieved positions, chosen by the placement of held-out cells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from alphastomics.data import AnnDataSource
from alphastomics.model import AlphaSTomics
from alphastomics.sampling import _fit_placement
from alphastomics.sampling._fit_placement import fit_placement, log_odds
from alphastomics.sampling._placement import Placement
from alphastomics.sampling._position import PositionSampler


@pytest.fixture
def source(trained):
    return AnnDataSource(trained.adata, trained.schema, positions=True)


@pytest.mark.parametrize("retrieval", _fit_placement.WEIGHTS)
def test_the_placement_that_is_most_like_the_truth_is_chosen(trained, source, monkeypatch, retrieval):
    best = Placement(retrieval=retrieval, refine=True)
    cells = source.slices[0]
    true = cells.position / source.schema.scale
    rng = np.random.default_rng(0)

    def place(self, rng_of_place, *, placement):
        import torch

        return torch.from_numpy(true if placement == best else true + rng.standard_normal(true.shape))

    monkeypatch.setattr(PositionSampler, "place", place)
    assert fit_placement(trained._make_sampler(), source, [cells]) == best


def test_too_few_cells_give_the_default(trained, source):
    cells = source.slices[0]
    few = cells._replace(rows=cells.rows[:5], position=cells.position[:5])
    sampler = trained._make_sampler()
    sampler = replace(sampler, fitted=replace(sampler.fitted, placement=None))
    for held_out in ([few], []):
        assert fit_placement(sampler, source, held_out) == Placement(retrieval=0.0, refine=True)


def test_the_score_of_the_truth_is_highest_and_that_of_chance_is_finite():
    rng = np.random.default_rng(0)
    true = rng.standard_normal((300, 2))
    best = 3 * np.log(1 / _fit_placement.LEAST - 1)
    assert log_odds(true, 3 * true) == pytest.approx(best)
    near, chance = log_odds(true, true + 0.1 * rng.standard_normal((300, 2))), log_odds(true, rng.permutation(true))
    assert best > near > chance > -best


def test_the_placement_is_fitted_after_training_and_saved(trained, tmp_path):
    fitted = trained.fitted_.placement
    assert fitted in [Placement(retrieval=w, refine=True) for w in _fit_placement.WEIGHTS]
    trained.save(tmp_path / "model")
    assert AlphaSTomics.load(tmp_path / "model", adata=False).fitted_.placement == fitted


@pytest.mark.parametrize("values", [{"retrieval": 1.5, "refine": True}, {"retrieval": 0.5, "refine": 1}])
def test_invalid_values_are_refused(values):
    with pytest.raises(ValueError, match="is not"):
        Placement.from_dict(values)


def test_an_argument_replaces_the_fitted_refinement(trained, reference):
    one = reference[reference.obs["slice_id"] == "slice_1"].copy()
    placed = {refine: trained.sample(one, refine=refine).obsm["spatial"] for refine in (None, True, False)}
    assert np.array_equal(placed[None], placed[trained.fitted_.placement.refine])
    assert not np.array_equal(placed[True], placed[False])
