"""A network that has not seen a part of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphastomics.config import Augmentation, PlanConfig
from alphastomics.data import AnnDataSource
from alphastomics.datasets import synthetic_tissue
from alphastomics.model import AlphaSTomics
from alphastomics.train.cross_fit import HELD_OUT, SHARE, cross_fit, divide


@pytest.fixture(params=[1, 2, 6])
def model(request):
    tissue = synthetic_tissue(n_slices=request.param, n_cells=120, n_genes=12, random_state=0)
    AlphaSTomics.setup_anndata(tissue, position_key="spatial", slice_key="slice_id")
    return AlphaSTomics(tissue, mode="expr_to_pos", d_model=16, n_heads=2, n_layers=1, random_state=0)


def source_of(model):
    return AnnDataSource(model.adata, model.schema, positions=True)


def fit(model, source, n_steps=20):
    settings = {"diffusion": model.diffusion, "plan": PlanConfig(), "augmentation": Augmentation()}
    return cross_fit(model.module, source, **settings, n_steps=n_steps, seed=3)


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


def test_a_share_of_the_steps_is_made(model, monkeypatch):
    steps = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args, **kw: steps.append(1) or step(self, *args, **kw))
    fit(model, source_of(model), n_steps=50)
    assert len(steps) == round(SHARE * 50)
