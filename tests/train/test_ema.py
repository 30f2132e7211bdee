"""The moving average against a computation by hand, and where it is at each moment of training."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from alphastomics.train import MovingAverage


def plan_of(value: float) -> torch.nn.Module:
    plan = torch.nn.Module()
    plan.module = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(plan.module.weight, value)
    torch.nn.init.constant_(plan.module.bias, -value)
    return plan


def weights(plan: torch.nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in plan.module.parameters()]


def test_the_step_of_a_checkpoint_is_no_step_of_the_optimizer():
    """It is known when training starts, and not before."""
    ema, plan, trainer = MovingAverage(0.9), plan_of(1.0), SimpleNamespace(global_step=0)
    ema.load_state_dict({"average": [torch.zeros(1, 2), torch.zeros(1)], "n_updates": 7})
    ema.on_fit_start(trainer, plan)
    trainer.global_step = 7
    ema.on_train_start(trainer, plan)
    ema.on_train_batch_end(trainer, plan, None, None, 0)
    assert ema.n_updates == 7
    assert not any(average.any() for average in ema.average)


def step(ema: MovingAverage, plan: torch.nn.Module, trainer: SimpleNamespace, value: float) -> None:
    """One step of an optimizer that sets all weights to a value."""
    trainer.global_step += 1
    with torch.no_grad():
        plan.module.weight.fill_(value)
        plan.module.bias.fill_(-value)
    ema.on_train_batch_end(trainer, plan, None, None, 0)


def trained(decay: float, values: list[float]) -> tuple[MovingAverage, torch.nn.Module, SimpleNamespace]:
    ema, plan, trainer = MovingAverage(decay), plan_of(1.0), SimpleNamespace(global_step=0)
    ema.on_fit_start(trainer, plan)
    for value in values:
        step(ema, plan, trainer, value)
    return ema, plan, trainer


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999])
def test_the_average_matches_the_formula(decay):
    values = np.random.default_rng(0).normal(size=20).tolist()
    ema, plan, _ = trained(decay, values)
    expected = 1.0
    for n, value in enumerate(values):
        beta = min(decay, (1 + n) / (10 + n))
        expected = beta * expected + (1 - beta) * value
    ema.finish(plan)
    np.testing.assert_allclose(weights(plan)[0], expected, rtol=1e-5)
    np.testing.assert_allclose(weights(plan)[1], -expected, rtol=1e-5)


def test_nothing_is_averaged_while_gradients_accumulate():
    ema, plan, trainer = trained(0.999, [2.0])
    before = [average.clone() for average in ema.average]
    with torch.no_grad():
        plan.module.weight.fill_(100.0)
    ema.on_train_batch_end(trainer, plan, None, None, 0)
    assert all(torch.equal(*pair) for pair in zip(before, ema.average, strict=True))


def test_swapping_twice_changes_no_byte():
    ema, plan, _ = trained(0.9, [2.0, 3.0, 5.0])
    raw = weights(plan)
    ema.swap(plan)
    assert weights(plan) != raw
    ema.swap(plan)
    assert weights(plan) == raw


def test_validation_uses_the_average_and_training_continues_unchanged():
    ema, plan, trainer = trained(0.9, [2.0, 3.0])
    raw, average = weights(plan), [x.flatten().tolist() for x in ema.average]
    ema.on_validation_start(trainer, plan)
    assert weights(plan) == average
    ema.on_validation_end(trainer, plan)
    assert weights(plan) == raw


@pytest.mark.parametrize("during_validation", [False, True])
def test_whenever_training_ends_the_average_is_kept(during_validation):
    ema, plan, trainer = trained(0.9, [2.0, 3.0])
    average = [x.flatten().tolist() for x in ema.average]
    if during_validation:
        ema.on_validation_start(trainer, plan)
    ema.finish(plan)
    assert weights(plan) == average
    ema.finish(plan)
    assert weights(plan) == average


def test_before_training_there_is_no_average():
    ema, plan = MovingAverage(0.9), plan_of(4.0)
    ema.on_validation_start(SimpleNamespace(), plan)
    ema.on_validation_end(SimpleNamespace(), plan)
    ema.finish(plan)
    assert weights(plan) == [[4.0, 4.0], [-4.0]]


def test_a_checkpoint_continues_the_average():
    values = [2.0, 3.0, 5.0, 7.0]
    whole, whole_plan, _ = trained(0.9, values)
    first, plan, trainer = trained(0.9, values[:2])
    second = MovingAverage(0.9)
    second.load_state_dict(first.state_dict())
    second.on_fit_start(trainer, plan)
    for value in values[2:]:
        step(second, plan, trainer, value)
    whole.finish(whole_plan)
    second.finish(plan)
    assert weights(plan) == weights(whole_plan)
