"""A network that has not seen a part of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphastomics.config import Augmentation, PlanConfig
from alphastomics.data import AnnDataSource
from alphastomics.datasets import synthetic_tissue
from alphastomics.model import AlphaSTomics
from alphastomics.sampling._held_out_score import HeldOutScores
from alphastomics.train import NonFiniteLossError, cross_fit as module_of_cross_fit
from alphastomics.train.cross_fit import DECAY, HELD_OUT, CrossFit, _Best, cross_fit, divide


@pytest.fixture(params=[1, 2, 6])
def model(request):
    tissue = synthetic_tissue(n_slices=request.param, n_cells=120, n_genes=12, random_state=0)
    AlphaSTomics.setup_anndata(tissue, position_key="spatial", slice_key="slice_id")
    return AlphaSTomics(tissue, mode="expr_to_pos", d_model=16, n_heads=2, n_layers=1, random_state=0)


def source_of(model):
    return AnnDataSource(model.adata, model.schema, positions=True)


def scores(spearman):
    """Scores that are higher for a higher correlation."""
    return HeldOutScores(100, 0.5, spearman, 0.5)


def fit(model, source, max_steps=5, score=lambda module, held_out: scores(0.5), max_seconds=None):
    settings = {"diffusion": model.diffusion, "plan": PlanConfig(), "augmentation": Augmentation()}
    return cross_fit(
        model.module,
        source,
        **settings,
        score=score,
        n_contexts=2,
        max_steps=max_steps,
        max_seconds=max_seconds,
        seed=3,
        device=torch.device("cpu"),
    )


def test_no_held_out_cell_is_read_in_training(model, monkeypatch):
    source, seen = source_of(model), []
    values = AnnDataSource.values
    monkeypatch.setattr(
        AnnDataSource, "values", lambda self, rows, **kwargs: seen.extend(rows.tolist()) or values(self, rows, **kwargs)
    )
    held_out = np.concatenate([cells.rows for cells in fit(model, source).held_out])
    assert seen
    assert not set(seen) & set(held_out.tolist())


def test_the_held_out_part_is_a_fourth_of_the_slices_or_cells(model):
    source = source_of(model)
    part, slices, held_out = divide(source)
    n_slices = len(source.slices)
    if n_slices == 1:
        assert sum(len(cells.rows) for cells in held_out) == source.n_cells // HELD_OUT
        assert part.n_cells == source.n_cells - source.n_cells // HELD_OUT
        (cells,) = held_out
        assert np.array_equal(model.adata.obsm["spatial"][cells.rows], cells.position)
        return
    assert len(held_out) == -(-(n_slices - 1) // HELD_OUT)
    assert {cells.name for cells in held_out}.isdisjoint(cells.name for cells in slices)
    assert len(slices) + len(held_out) == n_slices


def test_the_network_is_trained_and_the_first_one_is_not_changed(model):
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    state = torch.get_rng_state()
    second = fit(model, source_of(model)).module
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    assert second.config == model.module.config
    assert torch.equal(second.gene_weight, model.module.gene_weight)
    again = fit(model, source_of(model)).module.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in second.state_dict().items())


@pytest.fixture
def frequent(monkeypatch):
    """Cells are placed after 1, 2, 4, 8 … steps."""
    monkeypatch.setattr(module_of_cross_fit, "FIRST", 1)


@pytest.mark.parametrize(
    ("values", "expected", "n_placed", "is_best"),
    [
        ([1, 2, 3, 4, 5], 10, 5, False),  # after 1, 2, 4, 8 and 10 steps
        ([1, 3, 2, 4, 5], 10, 5, False),
        ([1, 2, 3, 2, 1], 4, 5, True),
        ([3, 2, 1], 1, 3, True),
        ([2, 3, 2, 1], 2, 4, True),
        ([1, 2, 3, 4, 3], 8, 5, False),  # 10 steps are hardly more than 8
    ],
)
def test_the_network_with_the_highest_score_is_kept(model, frequent, values, expected, n_placed, is_best):
    seen, remaining = [], iter(values)

    def score(module, held_out):
        seen.append({name: value.clone() for name, value in module.state_dict().items()})
        return scores(next(remaining) / 10)

    found = fit(model, source_of(model), max_steps=10, score=score)
    assert (found.n_steps, len(seen)) == (expected, n_placed)
    assert found.is_best == is_best
    assert found.scores == scores(max(values) / 10)
    best = seen[int(np.argmax(values))]
    assert all(torch.equal(value, best[name]) for name, value in found.module.state_dict().items())


def test_without_a_score_all_steps_are_made(model, frequent):
    placed = []
    found = fit(model, source_of(model), max_steps=6, score=lambda *_: placed.append(1))
    assert not found.is_best
    assert found.scores is None
    assert len(placed) == 4


def test_weights_that_became_infinite_raise(model):
    with pytest.raises(NonFiniteLossError, match="infinite within 5 steps"):
        fit(model, source_of(model), score=lambda *_: scores(np.nan))


def test_time_ends_the_training(model):
    found = fit(model, source_of(model), max_steps=10**9, max_seconds=0.3)
    assert not found.is_best


def test_the_average_is_that_of_the_formula():
    torch.manual_seed(0)
    module = torch.nn.Linear(2, 1)
    best, expected = _Best(module, lambda _: scores(0.5)), module.weight.detach().clone()
    for n in range(1, 2000):
        with torch.no_grad():
            module.weight.copy_(torch.randn(1, 2))
        best.update(module)
        beta = min(DECAY, n / (n + 9))
        expected = beta * expected + (1 - beta) * module.weight.detach()
    best.compare(1)
    torch.testing.assert_close(best.module.weight, expected)


def test_sufficient_steps(model):
    _, slices, held_out = divide(source_of(model))
    n_seen, n = sum(len(cells.rows) for cells in slices), source_of(model).n_cells
    found = CrossFit(model.module, slices, held_out, 128, is_best=True, scores=None)
    for placed in (1.0, 0.5):
        assert found.sufficient_steps(placed) == round(128 / placed * n / n_seen)
        assert found._replace(is_best=False).sufficient_steps(placed) is None
