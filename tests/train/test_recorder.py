"""What is recorded of a training, and that recording changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from alphastomics.data import ContextDataset, collate
from alphastomics.train import TrainingRecorder
from alphastomics.train.draws import VALIDATION

EXPERTS = {"use_moe": True, "num_experts": 2, "moe_top_k": 1}


@pytest.fixture
def batches(source):
    dataset = ContextDataset(source, context_size=60, seed=0, targets=True, slices=["slice_2"])
    return [collate([dataset[0]])]


def weights(plan) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in plan.module.parameters()]


def test_recording_changes_nothing(make_plan, fit, batches):
    alone, watched = make_plan(dropout=0.2), make_plan(dropout=0.2)
    torch.manual_seed(3)
    fit(alone, max_epochs=3)
    torch.manual_seed(3)
    recorder = TrainingRecorder(batches)
    fit(watched, max_epochs=3, callbacks=[recorder])
    assert len(recorder.points) == 3
    assert all(torch.equal(a, b) for a, b in zip(weights(alone), weights(watched), strict=True))


def test_the_last_point_is_the_loss_of_the_model_that_is_kept(make_plan, fit, batches):
    plan = make_plan(network=EXPERTS, moe_load_balance_loss_weight=0.5)
    recorder = TrainingRecorder(batches)
    fit(plan, max_epochs=2, callbacks=[recorder])
    plan.eval()
    with torch.no_grad():
        losses = plan.objective.losses(batches[0], purpose=VALIDATION)
        balance = losses.pop("balance")
        expected = float(plan.objective.total(losses, batches[0]))
    assert float(balance) > 0.5
    assert recorder.points[-1].validation_loss == pytest.approx(expected, rel=1e-5)


def test_training_loss_is_the_mean_of_the_epochs_without_balance(make_plan, fit, monkeypatch):
    monkeypatch.setattr("alphastomics.train.recorder.N_POINTS", 2)
    plan = make_plan(network=EXPERTS, moe_load_balance_loss_weight=0.5)
    recorder = TrainingRecorder()
    runner = fit(plan, max_epochs=4, callbacks=[recorder])
    history = {name: table.iloc[:, 0].to_numpy() for name, table in runner.model.history_.items()}
    task = history["train_loss"] - 0.5 * history["train_balance"]
    n_steps = runner.trainer.global_step
    assert [point.step for point in recorder.points] == [n_steps // 2, n_steps]
    assert [p.train_loss for p in recorder.points] == pytest.approx([task[:2].mean(), task[2:].mean()], rel=1e-5)
    assert all(np.isnan(point.validation_loss) for point in recorder.points)


def test_every_step_is_timed(make_plan, fit, monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr("alphastomics.train.recorder._read_clocks", lambda: (tick := float(next(ticks)), tick / 4))
    recorder = TrainingRecorder()
    runner = fit(make_plan(), max_epochs=2, callbacks=[recorder])
    assert len(recorder._steps) == runner.trainer.global_step
    assert (recorder.step_seconds, recorder.step_processor_seconds) == (1.0, 0.25)
    assert recorder.points[-1].seconds == 2 * runner.trainer.global_step + 2


def test_a_training_without_steps_has_no_record():
    assert np.isnan(TrainingRecorder().step_seconds)
