"""``distance_loss`` of a training plan: every kind trains, and is the loss that its name stands for."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

from alphastomics.config import DistanceKind
from alphastomics.train import PlanConfig, objective

CLAMPS = {"clamped": 0.5, "huber": 0.5}
kinds = pytest.mark.parametrize("kind", get_args(DistanceKind))


@kinds
def test_every_kind_trains(kind, small, make_model, train_briefly):
    model = make_model(small)
    before = model.module.state_dict()["position_out.weight"].clone()
    train_briefly(model, max_epochs=2, plan_kwargs={"distance_loss": kind})
    assert float(model.history["train_distance"].iloc[-1].item()) > 0
    assert not torch.equal(model.module.state_dict()["position_out.weight"], before)


@kinds
def test_each_name_selects_its_loss(kind, make_plan, make_batch, monkeypatch):
    """From all distances of the positions that the aligned loss is given."""
    clamps = {"distance_clamp": CLAMPS[kind]} if kind in CLAMPS else {}
    plan, batch = (
        make_plan(mode="expr_to_pos", modality_dropout=1.0, distance_loss=kind, **clamps),
        make_batch(n_epochs=1),
    )
    seen, aligned = [], objective.aligned_error
    monkeypatch.setattr(objective, "aligned_error", lambda *given: seen.append(given) or aligned(*given))
    losses = plan.objective.losses(batch)["distance"].detach()
    predicted, true, mask = (value.detach() for value in seen[0])
    for loss, x, y, real in zip(losses, predicted, true, mask, strict=True):
        r = (torch.cdist(x[real], x[real]) - torch.cdist(y[real], y[real]))[
            ~torch.eye(int(real.sum()), dtype=torch.bool)
        ]
        expected = {
            "mse": (r**2).mean(),
            "drmsd": (r**2).mean().sqrt(),
            "clamped": r.abs().clamp_max(0.5).mean(),
            "huber": torch.nn.functional.huber_loss(r, torch.zeros_like(r), delta=0.5),
        }
        np.testing.assert_allclose(float(loss), float(expected[kind]) / 2, rtol=1e-3)


@pytest.mark.parametrize(
    "options", [{"distance_loss": "fape"}, {"distance_clamp": 0.0, "distance_loss": "huber"}, {"distance_clamp": 2.0}]
)
def test_invalid_options_raise(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        PlanConfig(**options)
