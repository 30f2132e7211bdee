"""Trainings of one process that end early: a broken loss, Ctrl-C, SIGTERM, the time limit, memory that runs out."""

from __future__ import annotations

import logging
import os
import re
import signal

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from alphastomics.model import AlphaSTomics, NonFiniteLossError, _base
from alphastomics.sampling._fit import fit_statistics
from alphastomics.train import session
from alphastomics.train.interrupt import TimeLimit
from alphastomics.train.objective import Objective
from callbacks import Stop

FOUR = {"context_size": 50, "batch_size": 50}  # steps an epoch


class At(pl.Callback):
    """Something that happens before a batch."""

    def __init__(self, batch, act):
        self.batch, self.act = batch, act

    def on_train_batch_start(self, trainer, plan, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx == self.batch:
            self.act()


def finite(model):
    return all(bool(tensor.isfinite().all()) for tensor in model.module.state_dict().values())


def break_losses(monkeypatch, step, change):
    """Let the losses of one step go through `change`; those of the second network, which is trained before, do not."""
    losses, calls, cross_fit = Objective.losses, [], session.cross_fit

    def broken(self, batch, **kwargs):
        result = losses(self, batch, **kwargs)
        calls.append(0)
        return change(result) if len(calls) == step + 1 else result

    def unbroken(*args, **kwargs):
        with monkeypatch.context() as context:
            context.setattr(Objective, "losses", losses)
            return cross_fit(*args, **kwargs)

    monkeypatch.setattr(Objective, "losses", broken)
    monkeypatch.setattr(session, "cross_fit", unbroken)


def test_a_non_finite_loss_of_the_second_network_raises(model, train, monkeypatch):
    losses = Objective.losses
    monkeypatch.setattr(Objective, "losses", lambda *a, **kw: losses(*a, **kw) | {"aligned": torch.tensor([np.nan])})
    with pytest.raises(NonFiniteLossError, match="loss is nan at step 0"):
        train(model, max_epochs=5)
    assert finite(model)
    assert not model.is_trained_


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_loss_raises_and_the_model_stays_usable(model, train, weights_of, monkeypatch, value):
    good = train(max_epochs=50, callbacks=[Stop(3)])
    break_losses(monkeypatch, 3, lambda losses: losses | {"aligned": losses["aligned"] + value})
    with pytest.raises(NonFiniteLossError, match=rf"loss is {value:g} at step 3.*slice_0, slice_1"):
        train(model, max_epochs=50)
    assert finite(model)
    assert model.is_trained_
    assert weights_of(model) == weights_of(good), "these are not the weights after the last good step"
    assert np.isfinite(model.sample().obsm["spatial_reconstructed"]).all()
    assert model.history["train_loss"].index.tolist() == [0, 1, 2]
    monkeypatch.undo()
    train(model)
    assert model.history["train_loss"].index.tolist() == [0, 1, 2, 3]


def test_non_finite_gradient_of_a_finite_loss_keeps_the_weights(model, train, monkeypatch):
    # The square root has an infinite derivative where its argument is zero.
    break_losses(monkeypatch, 2, lambda losses: losses | {"aligned": ((losses["aligned"] * 0).sqrt() + 1)})
    with pytest.raises(NonFiniteLossError, match="step"):
        train(model, max_epochs=5)
    assert finite(model)
    assert np.isfinite(model.sample().obsm["spatial_reconstructed"]).all()


def test_loss_non_finite_from_the_start_leaves_an_untrained_model(model, train, monkeypatch):
    break_losses(monkeypatch, 0, lambda losses: losses | {"aligned": losses["aligned"] * np.nan})
    with pytest.raises(NonFiniteLossError, match="at step 0"):
        train(model, max_epochs=5)
    assert finite(model)
    with pytest.raises(RuntimeError, match="not trained"):
        model.sample()


class Interrupt(pl.Callback):
    """Ctrl-C at a step, in a given hook of Lightning."""

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


def test_ctrl_c_ends_training_with_a_usable_model(model, train, caplog, handler):
    train(model, max_epochs=50, callbacks=[Interrupt("on_train_batch_start", 3)])
    assert signal.getsignal(signal.SIGINT) is handler
    assert [record.levelname for record in caplog.records if "interrupted at step 3" in record.message] == ["WARNING"]
    assert model.is_trained_
    assert finite(model)
    assert np.isfinite(model.sample().obsm["spatial_reconstructed"]).all()
    assert model.history["train_loss"].index.tolist() == [0, 1, 2]
    train(model)
    assert model.history["train_loss"].index.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_validation_batch_start"])
def test_ctrl_c_keeps_the_average_of_the_weights(train, weights_of, hook):
    whole = train(max_epochs=50, validation_size=0.5, callbacks=[Stop(2)])
    stopped = train(max_epochs=50, validation_size=0.5, callbacks=[Interrupt(hook, 2)])
    assert weights_of(stopped) == weights_of(whole)


def test_ctrl_c_before_the_first_step_leaves_an_untrained_model(model, train):
    train(model, callbacks=[Interrupt("on_train_batch_start", 0)])
    assert not model.is_trained_
    assert finite(model)


def test_other_errors_are_raised_as_they_are(model, train, capsys, handler):
    def fail():
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        train(model, max_epochs=5, callbacks=[At(2, fail)])
    assert "Exception raised" not in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler
    assert model.is_trained_
    assert np.isfinite(model.sample().obsm["spatial_reconstructed"]).all()


class Seen(pl.Callback):
    """Step, epoch, and the first cell of every batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, plan, batch, _):
        self.seen.append((trainer.global_step, trainer.current_epoch, int(batch.rows[0, 0])))


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


# -- SIGTERM, which Slurm and Kubernetes send --------------------------------------------------------------------------


def test_a_termination_signal_saves_the_state_and_ends_the_script(model, train, path, step_of, weights_of, caplog):
    before = signal.getsignal(signal.SIGTERM)
    arguments = {"max_epochs": 2, "checkpoint": path, "resume": "last", "accumulate_grad_batches": 2, **FOUR}
    with pytest.raises(SystemExit) as ended:
        train(model, callbacks=[At(4, terminate)], **arguments)
    assert ended.value.code == 128 + signal.SIGTERM
    assert "SIGTERM at step 3" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before
    assert step_of(path) == 3
    resumed = train(**arguments)
    expected = train(max_epochs=2, accumulate_grad_batches=2, **FOUR)
    assert weights_of(resumed) == weights_of(expected)
    assert resumed.history["train_loss"].equals(expected.history["train_loss"])


def test_ctrl_c_waits_for_the_end_of_a_step_that_is_taken_in_parts(model, train, path, step_of):
    press = At(4, lambda: os.kill(os.getpid(), signal.SIGINT))
    train(model, callbacks=[press], max_epochs=2, checkpoint=path, accumulate_grad_batches=2, **FOUR)
    assert step_of(path) == model.trainer.global_step == 3


# -- max_time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulated", [1, 2])
def test_after_max_time_training_resumes_within_the_epoch(train, path, step_of, caplog, accumulated):
    caplog.set_level(logging.INFO, "alphastomics")
    parts, whole = (Seen(), Seen()), Seen()
    arguments = {"accumulate_grad_batches": accumulated, **FOUR}
    train(max_epochs=2, callbacks=[whole], **arguments)
    train(max_epochs=-1, max_time=1e-4, checkpoint=path, callbacks=[parts[0]], **arguments)
    assert step_of(path) == 1
    assert re.search(r" 0\.0001 seconds at step 1\b.*max_time=", caplog.text)
    train(max_epochs=2, max_time=600, checkpoint=path, resume="last", callbacks=[parts[1]], **arguments)
    assert parts[0].seen + parts[1].seen == whole.seen


def test_the_time_that_was_used_before_the_first_start_is_kept():
    first = TimeLimit(600.0, used=100.0)
    assert first.time_elapsed() == 100.0
    resumed = TimeLimit(600.0, used=1.0)  # loading took another time
    resumed.load_state_dict(first.state_dict())
    assert resumed.time_elapsed() == 100.0


def test_no_time_left_trains_nothing(train, path, weights_of):
    arguments = {"max_epochs": -1, "max_time": 1e-4, "checkpoint": path, "resume": "last", **FOUR}
    first = train(**arguments)
    again = train(**arguments)
    assert again.trainer.global_step == 1
    assert again.is_trained_
    assert weights_of(again) == weights_of(first)
    assert np.isfinite(again.sample().obsm["spatial_reconstructed"]).all()


def test_the_last_step_of_all_may_lie_within_an_epoch(train, path):
    parts, whole = (Seen(), Seen()), Seen()
    train(max_epochs=2, callbacks=[whole], **FOUR)
    train(max_epochs=2, max_steps=6, checkpoint=path, callbacks=[parts[0]], **FOUR)
    train(max_epochs=2, checkpoint=path, resume="last", callbacks=[parts[1]], **FOUR)
    assert parts[0].seen + parts[1].seen == whole.seen


def test_early_stopping_that_has_stopped_stays_so(train, weights_of, tmp_path):
    arguments = {"max_epochs": 20, "early_stopping": True, "early_stopping_patience": 1, "validation_size": 0.5}
    arguments |= {"early_stopping_min_delta": 1e9, "checkpoint": tmp_path / "last.ckpt", "resume": "last"}
    first = train(**arguments)
    again = train(**arguments)
    assert first.trainer.global_step == again.trainer.global_step == 2
    assert weights_of(again) == weights_of(first)
    more = train(**(arguments | {"early_stopping_patience": 3}))
    assert more.trainer.global_step == 4


def test_early_stopping_without_patience_trains_all_the_same(train):
    arguments = {"early_stopping": True, "early_stopping_patience": 0, "early_stopping_min_delta": 1e9}
    assert train(max_epochs=9, validation_size=0.5, **arguments).trainer.global_step == 2


# -- memory ------------------------------------------------------------------------------------------------------------


def no_room():
    torch.empty(2**50)


def full_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def no_memory():
    raise MemoryError


@pytest.mark.parametrize("run_out", [no_room, full_gpu, no_memory])
def test_out_of_memory_errors_suggest_smaller_arguments(model, train, path, step_of, run_out):
    arguments = {"max_epochs": 2, "checkpoint": path, "checkpoint_every": 2, "resume": "last", **FOUR}
    with pytest.raises(MemoryError) as error:
        train(model, callbacks=[At(5, run_out)], **arguments)
    assert isinstance(error.value, torch.OutOfMemoryError)
    said = str(error.value)
    assert re.search("50 cells.*50 cells.* 0\\.", said)
    for remedy in ("activations", "recompute='all'", "context_size=", "estimate_memory()", "resume='last'"):
        assert remedy in said
    assert model.is_trained_
    assert np.isfinite(model.sample().obsm["spatial_reconstructed"]).all()
    assert step_of(path) == 4
    assert train(**arguments).trainer.global_step == 8


def test_the_estimate_of_an_error_includes_accumulated_gradients(train, monkeypatch):
    seen = {}
    monkeypatch.setattr(session, "estimate_training", lambda *_, **arguments: seen.update(arguments))
    with pytest.raises(MemoryError):
        train(callbacks=[At(1, no_memory)], accumulate_grad_batches=2, **FOUR)
    assert seen["accumulate"]


def test_other_errors_are_not_reported_as_out_of_memory(train):
    def fail():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1") as error:
        train(callbacks=[At(1, fail)], **FOUR)
    assert not isinstance(error.value, MemoryError)


def test_statistics_are_fitted_at_the_first_use_after_an_error(model, small, die, path, monkeypatch):
    fitted = []

    def count(*args, **arguments):
        fitted.append(arguments["deformation"])
        return fit_statistics(*args, **arguments)

    monkeypatch.setattr(_base, "fit_statistics", count)
    die(path, model, step=2, max_epochs=4, checkpoint_every=1, plan_kwargs={"deformation": 0.25})
    assert fitted == []
    assert len(model.trainings_) == 1
    frame = model.fitted_.frame
    assert frame is not None
    assert np.isfinite(model.sample(small).obsm["spatial_reconstructed"]).all()
    assert fitted == [0.25]
    assert model.fitted_.frame is frame
    with pytest.raises(ValueError, match="not ended"):
        AlphaSTomics.load(path)
