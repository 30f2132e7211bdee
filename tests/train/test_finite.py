"""A gradient that is not finite changes no weight, and its step is found later by a process that does not wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from alphastomics.train import NonFiniteLossError, PlanConfig
from alphastomics.train.finite import FiniteCheck
from alphastomics.train.optimization import make_optimizer, override_settings
from alphastomics.train.plan import TrainingPlan

BROKEN = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("value", BROKEN)
def test_the_optimizer_skips_the_step(value):
    torch.manual_seed(0)
    module, check = torch.nn.Linear(3, 2), FiniteCheck(torch.device("cpu"))
    optimizer = make_optimizer(module, PlanConfig())
    for step, factor in enumerate((1.0, value, 1.0)):
        before = [p.detach().clone() for p in module.parameters()]
        optimizer.zero_grad()
        (module(torch.ones(4, 3)).square().sum() * factor).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])
        optimizer.found_inf = check.add(step, norm, torch.tensor([step, step + 1]))
        optimizer.step()
        unchanged = [torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True)]
        assert unchanged == [step == 1] * 2
    assert check.first == 1
    assert check.slices_of(1) == {1, 2}


def test_finite_gradients_are_not_reported():
    check = FiniteCheck(torch.device("cpu"))
    assert [float(check.add(step, torch.tensor(3.0))) for step in range(3)] == [0.0] * 3
    assert check.first is None


@pytest.mark.parametrize("scaler", [None, object()])
def test_scaled_gradients_are_not_clipped_for_a_fused_optimizer(make_plan, scaler):
    """Lightning removes the scale before clipping only if the optimizer is not fused."""
    plan = make_plan()
    state = {"estimated_stepping_batches": 10, "global_step": 0, "world_size": 1}
    plan._trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=scaler), **state)
    optimizer = plan.configure_optimizers()["optimizer"]
    assert optimizer.defaults["fused"] == (scaler is None)


@pytest.mark.parametrize("value", BROKEN)
def test_a_training_that_does_not_wait_ends_with_the_step_and_its_slices(make_plan, fit, monkeypatch, value):
    """As on a GPU, where the loss of a step is not read before the optimizer's step."""
    monkeypatch.setattr(TrainingPlan, "_waits", False)
    plan = make_plan()
    total = plan.objective.total
    plan.objective.total = lambda losses, batch, count=None: (
        total(losses, batch, count) * (value if plan.global_step >= 2 else 1.0)
    )
    with pytest.raises(NonFiniteLossError, match=r"NaN or infinite at step 2 \(slices: slice_"):
        fit(plan, max_epochs=3)
    assert all(bool(p.isfinite().all()) for p in plan.module.parameters())


def test_a_checkpoint_of_another_optimizer_is_resumed_with_a_fused_one():
    """Otherwise the kind of the optimizer is that of the checkpoint, and a step that is not fused refuses ``found_inf``."""
    module, config = torch.nn.Linear(2, 2), PlanConfig()
    first = make_optimizer(module, config, fused=False)
    module(torch.ones(1, 2)).sum().backward()
    first.step()
    checkpoint = {"optimizer_states": [first.state_dict()], "lr_schedulers": [{"base_lrs": [config.lr]}]}
    override_settings(checkpoint, config, fused=True)
    resumed = make_optimizer(module, config)
    resumed.load_state_dict(checkpoint["optimizer_states"][0])
    resumed.found_inf = torch.ones(())
    before = module.weight.clone()
    resumed.step()
    assert torch.equal(module.weight, before)
    resumed.found_inf = torch.zeros(())
    resumed.step()
    assert not torch.equal(module.weight, before)
