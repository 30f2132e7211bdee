"""The length of a training, which the placement of held-out cells determines unless it is given."""

from __future__ import annotations

import time

import pytest
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy

from alphastomics.config import DEFAULT_STEPS
from alphastomics.data import AnnDataSource
from alphastomics.model._base import ModelBase
from alphastomics.train import ContextDataModule, session
from alphastomics.train.arguments import TrainingArguments
from alphastomics.train.cross_fit import SHARE
from alphastomics.train.session import LEAST_SHARE
from alphastomics.train.timesteps import PLACED

N_STEPS = 3


@pytest.fixture(autouse=True)
def best_after(monkeypatch):
    """Held-out cells are placed best after a few steps, however long the second network is trained."""
    found = {}

    def cross_fit(*args, **kwargs):
        second = original(*args, **(kwargs | {"max_steps": 1}))._replace(n_steps=N_STEPS, is_best=True)
        found.update(kwargs, second=second)
        return second

    original = session.cross_fit
    monkeypatch.setattr(session, "cross_fit", cross_fit)
    return found


def train(model, **kwargs):
    model.train(accelerator="cpu", enable_progress_bar=False, **kwargs)
    return int(model.trainings_[-1]["n_steps"])


@pytest.mark.parametrize("limit", [{}, {"max_time": 60}])
@pytest.mark.slow
def test_a_training_ends_where_held_out_cells_are_placed_best(small, make_model, best_after, limit):
    model = make_model(small)
    n_steps = train(model, **limit)
    assert n_steps == best_after["second"].sufficient_steps(PLACED[model.mode]) == 6


@pytest.mark.parametrize("mode", ["expr_to_pos", "any"])
def test_networks_are_averaged_by_their_steps_of_placement(small, make_model, best_after, mode):
    model = make_model(small, mode=mode)
    n_steps = train(model)
    assert model.fitted_.second.share == N_STEPS / (N_STEPS + PLACED[mode] * n_steps)
    weights, kept = best_after["second"].module.state_dict(), model.fitted_.second.weights
    assert all(weights[name].equal(weight) for name, weight in kept.items())


def test_steps_of_all_trainings_and_adaptations_are_weighed(small, make_model):
    model = make_model(small)
    n_first = train(model, max_epochs=4)
    model.adapt(small)
    n_adapted = model.trainings_[0]["adaptations"][0]["n_steps"]
    n_steps = n_first + n_adapted + train(model, max_epochs=1)
    assert model.fitted_.second.share == N_STEPS / (N_STEPS + n_steps)


def test_steps_of_a_resumed_training_are_weighed_once(small, make_model, tmp_path):
    model, path = make_model(small), tmp_path / "last.ckpt"
    train(model, max_epochs=2, checkpoint=path)
    assert train(model, max_epochs=4, checkpoint=path, resume="last") == 4
    assert model.fitted_.second.share == N_STEPS / (N_STEPS + 4)


ACCUMULATED = {
    "context_size": 50,
    "batch_size": 50,
    "accumulate_grad_batches": 2,
}  # four batches and two steps an epoch


@pytest.mark.parametrize(
    "limit", [{"max_epochs": 20}, {"max_steps": 20, "max_epochs": -1}, {"max_epochs": 10, **ACCUMULATED}]
)
def test_a_length_that_is_given_is_kept(small, make_model, best_after, limit):
    assert train(make_model(small), **limit) == 20
    assert best_after["max_steps"] == 10


@pytest.mark.parametrize(
    ("arguments", "group_size"),
    [({"accumulate_grad_batches": 2}, 1), ({"devices": 2}, 1), ({"devices": 4, "num_nodes": 2}, 4)],
)
def test_the_default_length_counts_steps_of_the_optimizer(small, make_model, arguments, group_size):
    model, default = make_model(small), {"max_epochs": None, "max_time": None, "devices": 1, "precision": "32-true"}
    training = session.TrainingSession(
        model.module,
        TrainingArguments(
            context_size=50,
            batch_size=50,
            context_parallel_size=group_size,
            plan_kwargs=None,
            checkpoint=None,
            resume=None,
        ),
        default | {"accelerator": "cpu", "strategy": DDPStrategy()} | arguments,
        mode=model.mode,
        diffusion=model.diffusion,
        seed=0,
    )
    training.fit_layout(AnnDataSource(model.adata, model.schema, positions=True), whole_slices=False, resumed={})
    training.make_datamodule(ContextDataModule, None)
    assert training.max_epochs == DEFAULT_STEPS / 2 / 2  # four batches an epoch, two in a step


def test_the_second_network_is_not_trained_longer_than_for_the_default_training(small, make_model, best_after):
    def stop(trainer, *_):
        trainer.should_stop = True

    train(make_model(small), max_epochs=10**6, callbacks=[LambdaCallback(on_train_batch_end=stop)])
    assert best_after["max_steps"] == SHARE * DEFAULT_STEPS / 2


def test_no_second_network_without_placements(small, make_model, best_after):
    train(make_model(small, mode="pos_to_expr"), max_epochs=1)
    assert not best_after


def test_what_is_fitted_before_is_part_of_the_time(small, make_model, monkeypatch):
    def slow(self, *args):
        time.sleep(1)
        fit_draws(self, *args)

    def remember(trainer, plan):
        limits.append(plan.max_seconds)

    fit_draws, limits = ModelBase._fit_draws, []
    monkeypatch.setattr(ModelBase, "_fit_draws", slow)
    for limit in (600, 1):
        train(make_model(small), max_time=limit, max_epochs=1, callbacks=[LambdaCallback(on_train_start=remember)])
    assert 500 < limits[0] < 599
    assert limits[1] == LEAST_SHARE
