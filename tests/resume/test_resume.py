"""A training that is resumed from a checkpoint gives the result of one that was not interrupted."""

from __future__ import annotations

import logging
import os
import re

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from alphastomics.model import AlphaSTomics
from callbacks import Watch
from small_models import GROWING as LENGTHS


def watched(path):
    """What a checkpoint holds of the training."""
    state = torch.load(path, weights_only=True)
    moments = [value for entry in state["optimizer_states"][0]["state"].values() for value in entry.values()]
    return {
        "step": state["global_step"],
        "epoch": state["epoch"],
        "schedule": state["lr_schedulers"][0],
        "weights": state["state_dict"],
        "average": state["callbacks"]["MovingAverage"],
        "moments": moments,
        "history": state["callbacks"]["History"],
    }


def assert_alike(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_alike(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_alike(*pair)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_a_training_that_was_interrupted_between_epochs_ends_as_if_it_had_not_been(
    train, die, weights_of, tmp_path, often
):
    """Weights, average, moments of the optimizer, schedule, history: to the byte, without dropout."""
    whole, parts = tmp_path / "whole.ckpt", tmp_path / "parts.ckpt"
    expected = train(max_epochs=6, checkpoint=whole, validation_size=0.5)
    die(parts, step=3, max_epochs=6, validation_size=0.5)
    assert watched(parts)["step"] == 3
    resumed = train(max_epochs=6, resume=parts, checkpoint=parts, validation_size=0.5)
    assert weights_of(resumed) == weights_of(expected)
    assert_alike(watched(parts), watched(whole))
    for name, table in expected.history.items():
        np.testing.assert_array_equal(resumed.history[name], table)


def test_within_an_epoch_training_resumes_at_the_next_step(train, die, path, often):
    steps = {"context_size": 50, "batch_size": 50}  # four an epoch
    die(path, step=6, max_epochs=3, **steps)
    assert (watched(path)["step"], watched(path)["epoch"]) == (6, 1)

    class Seen(pl.Callback):
        def on_train_batch_start(self, trainer, plan, batch, batch_idx):
            seen.append((trainer.global_step, trainer.current_epoch, set(batch.key[:, 1].tolist())))

    seen = []
    train(max_epochs=3, resume=path, checkpoint=path, callbacks=[Seen()], **steps)
    assert [(step, epoch) for step, epoch, _ in seen] == [(6, 1), (7, 1), (8, 2), (9, 2), (10, 2), (11, 2)]
    assert [keys for *_, keys in seen] == [{1}, {1}, {2}, {2}, {2}, {2}], "contexts of another epoch"
    assert watched(path)["average"]["n_updates"] == watched(path)["step"] == 12


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_epoch_has_the_remaining_batches(train, die, weights_of, tmp_path, often, num_workers):
    """Weights, average, moments of the optimizer, schedule and history, to the byte."""
    whole, parts = tmp_path / "whole.ckpt", tmp_path / "parts.ckpt"
    steps = {"context_size": 50, "batch_size": 50, "max_epochs": 3, "num_workers": num_workers}  # four an epoch
    expected = train(checkpoint=whole, **steps)
    die(parts, step=6, **steps)
    resumed = train(resume=parts, checkpoint=parts, **steps)
    assert weights_of(resumed) == weights_of(expected)
    assert_alike(watched(parts), watched(whole))


# Layers are looked at every ten steps, which are two epochs: what was seen in a step may be all of an epoch.
EVERYTHING = {"mode": "any", "d_model": 16, "dropout": 0.2, "use_moe": True, "moe_top_k": 1, "enable_masking": True}
GROWING = {
    "context_growth": "linear",
    "shortest_context": 20,
    "growth_steps": 8,
    "context_size": 50,
    "batch_size": 50,
    "accumulate_grad_batches": 2,
    "max_epochs": 4,
    "validation_size": 0.5,
    "early_stopping": True,
    "plan_kwargs": {"warmup_steps": 4},
    "checkpoint_every": 1,
}


@pytest.mark.parametrize("step", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_the_full_state_of_a_training_is_saved(train, die, small, make_model, weights_of, tmp_path, undisturbed, step):
    """Dropout, experts and their use, masks, growing contexts, accumulated gradients, early stopping: the same bytes."""
    parts = tmp_path / "parts.ckpt"
    die(parts, make_model(small, **EVERYTHING), step=step, **GROWING)
    assert watched(parts)["step"] == step
    resumed = train(make_model(small, **EVERYTHING), resume=parts, checkpoint=parts, **GROWING)
    expected, state = undisturbed
    assert weights_of(resumed) == weights_of(expected)
    assert_alike(watched(parts), state)
    assert any(name.startswith("train_layer_0_expert_usage") for name in resumed.history)
    for name, table in expected.history.items():
        pd.testing.assert_frame_equal(resumed.history[name], table)


@pytest.fixture(scope="module")
def undisturbed(_reference, make_model, train_briefly, tmp_path_factory):
    """That training without an interruption, and its last checkpoint."""
    path = tmp_path_factory.mktemp("whole") / "last.ckpt"
    small = _reference[np.r_[0:100, 300:400]].copy()
    model = train_briefly(make_model(small, **EVERYTHING), checkpoint=path, **GROWING)
    return model, watched(path)


def test_training_resumes_with_the_given_learning_rate(train, die, path, often):
    """As after a NaN it must."""

    class Rates(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            (group,) = trainer.optimizers[0].param_groups
            seen.append(group["lr"])

    seen = []
    rates = {"max_epochs": 4, "callbacks": [Rates()]}
    train(plan_kwargs={"lr": 4e-4}, **rates)
    expected, seen = np.array(seen), []
    die(path, step=2, max_epochs=4, plan_kwargs={"lr": 4e-4})
    train(resume=path, plan_kwargs={"lr": 1e-4}, **rates)
    np.testing.assert_allclose(seen, expected[2:] * 0.25, rtol=1e-12)


# -- resume="last" -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [False, True])
def test_one_script_is_restarted_until_it_has_finished(train, die, weights_of, tmp_path, often, caplog, folder):
    caplog.set_level(logging.INFO, "alphastomics")
    path = tmp_path if folder else tmp_path / "last.ckpt"
    arguments = {"max_epochs": 4, "checkpoint": path, "resume": "last"}
    expected = train(max_epochs=4)
    for step in (1, 3):
        die(path, step=step, max_epochs=4, resume="last")
        assert watched(tmp_path / "last.ckpt")["step"] == step
    assert str(path) in caplog.text
    assert re.search(r"step 1\b.*epoch 0\b", caplog.text)
    for _ in range(2):  # the second time nothing is left to do
        resumed = train(**arguments)
        assert weights_of(resumed) == weights_of(expected)
        assert resumed.is_trained_
        assert resumed.trainer.global_step == 4
        assert resumed.history["train_loss"].equals(expected.history["train_loss"])
    assert list(tmp_path.iterdir()) == [tmp_path / "last.ckpt"]
    AlphaSTomics.load(tmp_path / "last.ckpt", adata=False)


def test_the_newest_complete_checkpoint_is_loaded(train, tmp_path, caplog):
    for i, epochs in enumerate((1, 3, 2)):
        path = tmp_path / f"{i}.ckpt"
        train(checkpoint=path, max_epochs=epochs)
        os.utime(path, (i, i))
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes((tmp_path / "1.ckpt").read_bytes()[:-1000])
    (tmp_path / ".last.tmp.ckpt").write_bytes(b"")
    caplog.set_level(logging.INFO, "alphastomics")
    train(checkpoint=tmp_path, resume="last", max_epochs=4)
    assert str(cut) in caplog.text
    assert re.search(r"step 2\b.*epoch 2\b", caplog.text)


def test_a_foreign_folder_is_not_overwritten(train, path, small, make_model):
    with pytest.raises(ValueError, match="checkpoint="):
        train(resume="last")
    train(make_model(small, d_model=16), checkpoint=path)
    with pytest.raises(ValueError, match="d_model=16"):
        train(checkpoint=path, resume="last")
    torch.save({"model": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="checkpoint of AlphaSTomics"):
        train(checkpoint=path, resume="last")


def test_batches_are_divided_as_they_were(train, path, caplog, often):
    """Whatever memory is free when the training is resumed."""
    parts = []

    class Parts(pl.Callback):
        def on_train_batch_start(self, trainer, plan, batch, _):
            parts.append(tuple(batch.mask.shape))

    steps = {"context_size": "auto", "batch_size": 200, "checkpoint": path, "resume": "last"}
    train(micro_batch_size=100, **steps)
    train(max_epochs=2, callbacks=[Parts()], **steps)
    assert parts == [(1, 100)] * 2
    assert "micro_batch_size" not in caplog.text
    train(max_epochs=3, micro_batch_size=200, **steps)
    assert re.search(r"micro_batch_size=100\b.* 200\b", caplog.text)


def test_the_average_is_not_updated_while_gradients_accumulate(train, path, often):
    steps = {"context_size": 50, "batch_size": 50, "accumulate_grad_batches": 2}
    train(max_epochs=1, checkpoint=path, **steps)
    assert watched(path)["average"]["n_updates"] == watched(path)["step"] == 2
    train(max_epochs=2, resume=path, checkpoint=path, **steps)
    assert watched(path)["average"]["n_updates"] == watched(path)["step"] == 4


class LateRestore(SingleDeviceStrategy):
    """Restores a checkpoint after ``on_fit_start``, as FSDP2 does."""

    restore_checkpoint_after_setup = True


@pytest.mark.parametrize("strategy", ["auto", LateRestore("cpu")], ids=["auto", "late"])
def test_time_counts_from_the_beginning(model, train, path, strategy):
    train(max_epochs=1, max_time=100, checkpoint=path)
    state = torch.load(path, weights_only=True)
    assert 0 < state["elapsed_seconds"] < 100
    state["elapsed_seconds"] = 940.0  # of what the second network leaves of 1000
    torch.save(state, path)

    watch = Watch()
    train(model, max_epochs=-1, max_steps=3, max_time=1000, resume=path, callbacks=[watch], strategy=strategy)
    assert len(watch.seen) == 2
    assert all(0.9 <= progress < 1 for *_, progress in watch.seen)


# -- contexts that grow ------------------------------------------------------------------------------------------------


def state_of(path):
    state = torch.load(path, weights_only=True)
    return state["state_dict"], state["callbacks"]["MovingAverage"]["average"], state["lr_schedulers"][0]["_last_lr"]


def assert_equal_states(one, other):
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    assert one[2] == other[2]


@pytest.mark.parametrize("die_at", [1, 5, 6], ids=lambda step: f"step{step}")
def test_a_resumed_training_continues_with_the_same_lengths(train, die, tmp_path, often, die_at):
    """Weights, average and learning rate to the bit; epochs begin with even steps."""
    whole, parts = tmp_path / "whole.ckpt", tmp_path / "parts.ckpt"
    arguments = LENGTHS | {"max_epochs": 6}
    undisturbed, resumed = Watch(), Watch()
    train(checkpoint=whole, callbacks=[undisturbed], **arguments)
    die(parts, step=die_at, **arguments)
    train(checkpoint=parts, resume=parts, callbacks=[resumed], **arguments)
    assert resumed.seen == undisturbed.seen[die_at:]
    assert len({longest for _, _, longest, _, _ in resumed.seen}) > 1
    assert_equal_states(state_of(parts), state_of(whole))
