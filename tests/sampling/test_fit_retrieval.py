"""Weight of retrieved positions, chosen by the placement of held-out cells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphastomics.data import AnnDataSource
from alphastomics.model import AlphaSTomics
from alphastomics.sampling._fit_retrieval import LEAST, WEIGHTS, fit_retrieval_weight, log_odds, score_mean
from alphastomics.sampling._position import PositionSampler
from alphastomics.sampling._sampler import FittedStatistics


@pytest.fixture
def source(trained):
    return AnnDataSource(trained.adata, trained.schema, positions=True)


@pytest.mark.parametrize("best", WEIGHTS)
def test_the_placement_that_is_most_like_the_truth_is_chosen(trained, source, monkeypatch, best):
    cells = source.slices[0]
    true = cells.position / source.schema.scale
    wrong = true + np.random.default_rng(0).standard_normal(true.shape)

    def place(self, rng, *, refine, retrieval_weight):
        assert refine
        return torch.from_numpy(true if retrieval_weight == best else wrong)

    monkeypatch.setattr(PositionSampler, "place", place)
    sampler = trained._make_sampler()
    assert fit_retrieval_weight(sampler, source, [cells]) == best
    assert (score_mean(sampler, source, [cells]) == log_odds(true, true)) == (best == 0)


def test_too_few_cells_give_no_weight_and_no_score(trained, source):
    cells, sampler = source.slices[0], trained._make_sampler()
    few = cells._replace(rows=cells.rows[:5], position=cells.position[:5])
    for held_out in ([few], []):
        assert fit_retrieval_weight(sampler, source, held_out) == 0
        assert score_mean(sampler, source, held_out) is None


def test_the_score_of_the_truth_is_highest_and_that_of_chance_is_finite():
    rng = np.random.default_rng(0)
    true = rng.standard_normal((300, 2))
    best = 3 * np.log(1 / LEAST - 1)
    assert log_odds(true, 3 * true) == pytest.approx(best)
    near, chance = log_odds(true, true + 0.1 * rng.standard_normal((300, 2))), log_odds(true, rng.permutation(true))
    assert best > near > chance > -best


def test_the_weight_is_fitted_after_training_and_saved(trained, tmp_path):
    fitted = trained.fitted_.retrieval_weight
    assert fitted in WEIGHTS
    trained.save(tmp_path / "model")
    assert AlphaSTomics.load(tmp_path / "model", adata=False).fitted_.retrieval_weight == fitted


@pytest.mark.parametrize("weight", [1.5, -0.1, True, "0.5", None])
def test_invalid_weights_are_refused(weight):
    values = FittedStatistics().to_dict() | {"retrieval_weight": weight}
    with pytest.raises(ValueError, match="retrieval_weight"):
        FittedStatistics.restore(values, {}, n_genes=5, n_dims=2)
