"""Training that ends badly leaves a model that can be used."""

from __future__ import annotations

import signal

import lightning.pytorch as pl
import numpy as np
import pytest

from alphastomics.model import NonFiniteLossError
from alphastomics.train.objective import Objective


class Stop(pl.Callback):
    """An orderly end after some steps of a training that was meant to be longer."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step


def finite(model):
    return all(bool(tensor.isfinite().all()) for tensor in model.module.state_dict().values())


def break_losses(monkeypatch, step, change):
    """Let the losses of one step go through `change`."""
    losses, calls = Objective.losses, []

    def broken(self, batch, **kwargs):
        result = losses(self, batch, **kwargs)
        calls.append(0)
        return change(result) if len(calls) == step + 1 else result

    monkeypatch.setattr(Objective, "losses", broken)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_loss_is_told_and_the_model_stays_usable(
    small, make_model, train_briefly, weights_of, monkeypatch, value
):
    good = train_briefly(make_model(small), max_epochs=50, callbacks=[Stop(3)])
    break_losses(monkeypatch, 3, lambda losses: losses | {"aligned": losses["aligned"] + value})
    model = make_model(small)
    with pytest.raises(NonFiniteLossError, match=rf"loss is {value:g} at step 3 \(slices: slice_0, slice_1\)"):
        train_briefly(model, max_epochs=50)
    assert finite(model)
    assert model.is_trained_
    assert weights_of(model) == weights_of(good), "these are not the weights after the last good step"
    assert np.isfinite(model.sample(n_steps=2).obsm["spatial"]).all()
    assert model.history["train_loss"].index.tolist() == [0, 1, 2]
    monkeypatch.undo()
    train_briefly(model)
    assert model.history["train_loss"].index.tolist() == [0, 1, 2, 3]


def test_non_finite_gradient_of_a_finite_loss_breaks_nothing(small, make_model, train_briefly, monkeypatch):
    # The square root has an infinite derivative where its argument is zero.
    break_losses(monkeypatch, 2, lambda losses: losses | {"aligned": ((losses["aligned"] * 0).sqrt() + 1)})
    model = make_model(small)
    with pytest.raises(NonFiniteLossError, match="step"):
        train_briefly(model, max_epochs=5)
    assert finite(model)
    assert np.isfinite(model.sample(n_steps=2).obsm["spatial"]).all()


def test_loss_that_is_broken_from_the_start_leaves_an_untrained_model(small, make_model, train_briefly, monkeypatch):
    break_losses(monkeypatch, 0, lambda losses: losses | {"aligned": losses["aligned"] * np.nan})
    model = make_model(small)
    with pytest.raises(NonFiniteLossError, match="at step 0"):
        train_briefly(model, max_epochs=5)
    assert finite(model)
    with pytest.raises(RuntimeError, match="not trained"):
        model.sample()


class Interrupt(pl.Callback):
    """Ctrl-C at a step, where a hook of Lightning's says."""

    def __init__(self, hook, step):
        self.step = step
        setattr(self, hook, self.press)

    def press(self, trainer, *_):
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture
def handler():
    """What Ctrl-C does outside training."""

    def stop(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    yield stop
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_training_with_a_usable_model(small, make_model, train_briefly, caplog, handler):
    model = make_model(small)
    train_briefly(model, max_epochs=50, callbacks=[Interrupt("on_train_batch_start", 3)])
    assert signal.getsignal(signal.SIGINT) is handler
    assert [record.levelname for record in caplog.records if "interrupted at step 3" in record.message] == ["WARNING"]
    assert model.is_trained_
    assert finite(model)
    assert np.isfinite(model.sample(n_steps=2).obsm["spatial"]).all()
    assert model.history["train_loss"].index.tolist() == [0, 1, 2]
    train_briefly(model)
    assert model.history["train_loss"].index.tolist() == [0, 1, 2, 3]


def test_ctrl_c_keeps_the_average_of_the_weights(small, make_model, train_briefly, weights_of):
    whole = train_briefly(make_model(small), max_epochs=50, callbacks=[Stop(2)])
    stopped = make_model(small)
    train_briefly(stopped, max_epochs=50, callbacks=[Interrupt("on_train_batch_start", 2)])
    assert weights_of(stopped) == weights_of(whole)


def test_ctrl_c_during_validation_keeps_the_average_too(small, make_model, train_briefly, weights_of):
    whole = train_briefly(make_model(small), max_epochs=50, validation_size=0.5, callbacks=[Stop(2)])
    stopped = make_model(small)
    interrupt = Interrupt("on_validation_batch_start", 2)
    train_briefly(stopped, max_epochs=50, validation_size=0.5, callbacks=[interrupt])
    assert weights_of(stopped) == weights_of(whole)


def test_ctrl_c_before_the_first_step_leaves_an_untrained_model(small, make_model, train_briefly):
    model = make_model(small)
    train_briefly(model, callbacks=[Interrupt("on_train_batch_start", 0)])
    assert not model.is_trained_
    assert finite(model)


def test_other_errors_are_raised_as_they_are(small, make_model, train_briefly, capsys, handler):
    class Fail(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 2:
                raise OSError("disk full")

    model = make_model(small)
    with pytest.raises(OSError, match="disk full"):
        train_briefly(model, max_epochs=5, callbacks=[Fail()])
    assert "Exception raised" not in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler
    assert model.is_trained_
    assert np.isfinite(model.sample(n_steps=1).obsm["spatial"]).all()
