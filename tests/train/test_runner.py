"""Whole trainings, tiny: what they leave behind, also when they end badly."""

from __future__ import annotations

import signal
from datetime import timedelta

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from alphastomics.data import Augmentation
from alphastomics.train import MODES, History, MovingAverage, NonFiniteLossError, seconds_of
from callbacks import AtStep


def weights(plan) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in plan.module.parameters()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (90, 90.0),
        (0.5, 0.5),
        ("00:00:01:30", 90.0),
        ("1:02:03:04", 93784.0),
        (timedelta(minutes=2), 120.0),
        ({"minutes": 1, "seconds": 5}, 65.0),
    ],
)
def test_times_match_lightning_or_seconds(given, seconds):
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("bad", ["90", "1:30", "00:00:90", "a:b:c:d", "00:00:00:-5"])
def test_a_time_in_another_format_raises(bad):
    with pytest.raises(ValueError, match="DD:HH:MM:SS"):
        seconds_of(bad)


@pytest.mark.parametrize("bad", [0, -1, "00:00:00:00", timedelta(0), float("nan")])
def test_an_invalid_time_raises(bad):
    with pytest.raises(ValueError, match="positive"):
        seconds_of(bad)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_takes_steps_with_a_finite_loss(make_plan, fit, mode):
    plan = make_plan(mode=mode)
    before = weights(plan)
    runner = fit(plan, data={"validation_size": 0.3})
    history = runner.model.history_
    assert np.isfinite([table.to_numpy() for table in history.values()]).all()
    assert {"train_loss", "validation_loss"} <= set(history)
    assert runner.trainer.global_step == 2
    assert not equal(weights(plan), before)
    assert runner.model.is_trained_
    assert not plan.module.training


def test_a_shared_frame_is_trained(make_plan, fit, sources):
    runner = fit(make_plan(shared_frame=True), data={"source": sources["shared"]})
    assert np.isfinite(runner.model.history_["train_loss"].to_numpy()).all()


def test_the_same_seed_gives_the_same_bytes(make_plan, fit):
    """Whatever the stream of the process does meanwhile."""
    results = []
    for stream, seed in ((1, 0), (2, 0), (1, 1)):
        plan = make_plan()
        torch.manual_seed(stream)
        np.random.seed(stream)
        fit(plan, max_epochs=3, data={"seed": seed})
        results.append(weights(plan))
    assert equal(results[0], results[1])
    assert not equal(results[0], results[2])


def test_history_has_one_value_for_each_epoch_and_continues(make_plan, fit):
    plan = make_plan()
    first = fit(plan, max_epochs=2).model.history_
    assert first["train_loss"].index.tolist() == [0, 1]
    second = fit(plan, max_epochs=1, history=History(first)).model.history_
    assert second["train_loss"].index.tolist() == [0, 1, 2]
    assert second["train_loss"]["train_loss"].tolist()[:2] == first["train_loss"]["train_loss"].tolist()


def test_training_reduces_the_losses(make_plan, fit):
    plan = make_plan(mode="expr_to_pos", modality_dropout=1.0, lr=5e-3, warmup_steps=5)
    history = fit(plan, max_epochs=12, data={"augmentation": Augmentation(gene_dropout=0.0)}).model.history_
    for name, share in {"train_aligned": 0.75, "train_distance": 0.6, "train_loss": 0.85}.items():
        values = history[name][name].to_numpy()
        assert values[-4:].mean() < share * values[0], name


def test_the_average_is_kept(make_plan, fit):
    """Followed by hand from the weights after each step."""
    plan, seen = make_plan(), []
    follow = pl.callbacks.LambdaCallback(on_train_batch_end=lambda *_: seen.append(weights(plan)))
    expected = [weight.clone() for weight in weights(plan)]
    fit(plan, max_epochs=2, callbacks=[follow])
    for n, after in enumerate(seen):
        share = 1 - min(plan.config.ema_decay, (1 + n) / (10 + n))
        expected = [old.lerp(new, share) for old, new in zip(expected, after, strict=True)]
    for actual, by_hand in zip(weights(plan), expected, strict=True):
        torch.testing.assert_close(actual, by_hand, atol=1e-6, rtol=1e-5)


def poison(trainer, plan) -> None:
    plan.objective.total = lambda losses, batch, count=None: plan.module.position_out.bias.sum() * float("nan")


def test_a_loss_that_is_not_finite_names_the_step_and_the_slices(make_plan, fit):
    plan = make_plan(modality_dropout=1.0)
    with pytest.raises(NonFiniteLossError, match=r"nan at step 2.*slice_") as error:
        fit(plan, max_epochs=3, callbacks=[AtStep(2, poison)])
    assert "lr" in str(error.value)


def spoil(trainer, plan) -> None:
    plan.module.position_out.bias.register_hook(lambda gradient: gradient * float("inf"))


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(make_plan, fit):
    plan = make_plan(modality_dropout=1.0, mode="expr_to_pos")
    with pytest.raises(NonFiniteLossError, match=r"norm is (inf|nan) at step 2.*slice_"):
        fit(plan, max_epochs=3, callbacks=[AtStep(2, spoil)])
    assert all(bool(weight.isfinite().all()) for weight in weights(plan))


def test_after_a_non_finite_loss_the_last_finite_average_is_kept(make_plan, fit):
    """The same as if training had ended before the bad step."""
    bad, good = make_plan(), make_plan()
    with pytest.raises(NonFiniteLossError):
        fit(bad, max_epochs=2, callbacks=[AtStep(2, poison)])
    fit(good, max_epochs=2, callbacks=[AtStep(2, lambda trainer, plan: interrupt())])
    assert all(bool(weight.isfinite().all()) for weight in weights(bad))
    assert equal(weights(bad), weights(good))


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_keeps_a_trained_model_and_restores_the_signal_handler(make_plan, fit, caplog):
    plan, handler = make_plan(), signal.getsignal(signal.SIGINT)
    before = weights(plan)
    runner = fit(plan, max_epochs=50, callbacks=[AtStep(3, lambda trainer, plan: interrupt())])
    assert runner.trainer.global_step == 3
    assert runner.model.is_trained_
    assert not equal(weights(plan), before)
    assert signal.getsignal(signal.SIGINT) is handler
    assert "interrupted at step 3" in caplog.text


def test_an_interrupt_before_the_first_step_trains_nothing(make_plan, fit):
    plan = make_plan()
    before = weights(plan)
    runner = fit(plan, callbacks=[AtStep(0, lambda trainer, plan: interrupt())])
    assert not runner.model.is_trained_
    assert equal(weights(plan), before)


def test_time_ends_training(make_plan, fit):
    runner = fit(make_plan(max_seconds=0.5), max_epochs=-1, max_seconds=0.5)
    assert runner.model.is_trained_
    assert np.isfinite(runner.model.history_["train_loss"].to_numpy()).all()


def test_early_stopping_follows_the_validation_loss(make_plan, fit):
    """With a learning rate of zero nothing improves."""
    runner = fit(
        make_plan(lr=1e-30, weight_decay=0.0),
        max_epochs=20,
        early_stopping=True,
        early_stopping_patience=2,
        data={"validation_size": 0.3},
    )
    loss = runner.model.history_["validation_loss"]["validation_loss"].tolist()
    assert loss == [loss[0]] * 3


def test_no_file_is_written(make_plan, fit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(make_plan())
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_holds_the_average_and_the_history(make_plan, fit, tmp_path):
    saver = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="x", save_top_k=1, every_n_epochs=2)
    plan = make_plan()
    fit(plan, max_epochs=2, callbacks=[saver], enable_checkpointing=True)
    checkpoint = torch.load(tmp_path / "x.ckpt", weights_only=True)
    states = {type(c).__name__: c.state_dict() for c in (MovingAverage(0.9), History())}
    assert set(states) <= set(checkpoint["callbacks"])
    kept = checkpoint["callbacks"]["MovingAverage"]
    assert kept["n_updates"] == plan.trainer.global_step
    assert equal(kept["average"], weights(plan))
    assert set(checkpoint["callbacks"]["History"]["values"]) == set(plan.trainer.callback_metrics) - {"loss"}
