"""Linear or gated attention, dense or with experts: from masked training to samples in every direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from alphastomics.data import Augmentation
from alphastomics.diffusion import MaskingConfig

if TYPE_CHECKING:
    from alphastomics.model import AlphaSTomics

LINEAR = {"attention": "linear"}
GATED = {"attention": "full", "gate_type": "headwise", "use_qk_norm": True}
EXPERTS = {"use_moe": True, "num_experts": 4, "moe_top_k": 2}
CONFIGURATIONS = {
    "linear": LINEAR,
    "gated": GATED,
    "linear, experts": LINEAR | EXPERTS,
    "gated, experts": GATED | EXPERTS,
}


@pytest.fixture(scope="module", params=CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def configured(request, _reference, make_model, train_briefly) -> AlphaSTomics:
    """A small model of one configuration, trained on two slices with masks in every context, judged on the third."""
    cells = _reference[::2].copy()
    model = make_model(cells, setup={"slice_key": "slice_id"}, mode="any", enable_masking=True, **request.param)
    plan = {"lr": 6e-3, "warmup_steps": 5, "ema_decay": 0.9}
    return train_briefly(
        model,
        max_epochs=16,  # one context in four places cells
        context_size=75,
        batch_size=150,
        validation_size=0.34,
        augmentation=Augmentation(),
        masking=MaskingConfig(masking_probability=1.0),
        plan_kwargs=plan,
    )


def test_clean_values_and_latent_of_every_cell(configured):
    network = configured.module
    n_genes, width = configured.schema.n_genes, network.config.d_model
    with torch.no_grad():
        output = network(torch.randn(2, 9, n_genes), torch.randn(2, 9, 2), torch.zeros(2), torch.full((2,), 0.5))
    assert [value.shape for value in output] == [(2, 9, n_genes), (2, 9, 2), (2, 9, width)]
    assert all(bool(value.isfinite().all()) for value in output)


@pytest.mark.parametrize(("loss", "share"), [("distance", 0.85), ("expression", 0.95)])
def test_training_generalizes_to_another_slice(configured, loss, share):
    """Of places, what is learned first holds in the training slices alone: their loss rises before it falls."""
    values = configured.history[f"validation_{loss}"].to_numpy()[:, 0]
    assert values[-1] < share * (values.max() if loss == "distance" else values[0])


def test_masked_entries_are_predicted(configured):
    assert (configured.history["train_masked"].to_numpy() > 0).all()


def test_balance_loss_is_present_with_experts(configured):
    assert ("train_balance" in configured.history) == configured.module.config.use_moe


@pytest.mark.parametrize("mode", ["expr_to_pos", "pos_to_expr", "joint"])
def test_every_direction_is_sampled(configured, reference, mode):
    cells = reference[reference.obs["slice_id"] == "slice_2"].copy()
    query = {"n_cells": len(cells)} if mode == "joint" else {"adata": cells}
    steps = {} if mode == "expr_to_pos" else {"n_steps": 3}
    tissue = configured.sample(mode=mode, **steps, **query)
    assert tissue.shape == cells.shape
    position = tissue.obsm["spatial_reconstructed" if mode == "expr_to_pos" else "spatial"]
    assert position.shape == (len(cells), 2)
    for value in (tissue.X.toarray(), position):
        assert np.isfinite(value).all()
        assert (value.std(axis=0) > 0).any()
