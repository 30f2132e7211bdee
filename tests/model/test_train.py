"""Training: repeatable, and with a usable model however it ends."""

from __future__ import annotations

import logging
import signal
import time
from datetime import timedelta

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import pytest
import scvi
import torch

import alphastomics as asx
from alphastomics.model import AlphaSTomics, NonFiniteLossError
from alphastomics.train import TrainingPlan

MODES = ("expr_to_pos", "pos_to_expr", "joint", "any")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Whatever is trained here leaves nothing in the working directory."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture
def small(reference):
    """Two slices of 100 cells: one step an epoch with the batches of `train_briefly`."""
    return reference[np.r_[0:100, 300:400]].copy()


class Stop(pl.Callback):
    """An orderly end after some steps of a training that was meant to be longer."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step


def finite(model):
    return all(bool(tensor.isfinite().all()) for tensor in model.module.state_dict().values())


# -- the same again -----------------------------------------------------------------------------------------------------


def test_same_seed_gives_the_same_bytes(small, make_model, train_briefly, weights_of, positions_of):
    results = []
    for disturbance, seed in ((1, 7), (2, 7), (3, 8)):
        torch.manual_seed(disturbance)
        np.random.seed(disturbance)
        model = train_briefly(make_model(small, random_state=seed, dropout=0.3), max_epochs=2)
        torch.manual_seed(disturbance + 10)
        results.append((weights_of(model), positions_of(model.sample(n_steps=3)), model.history["train_loss"]))
    assert results[0][:2] == results[1][:2]
    pd.testing.assert_frame_equal(results[0][2], results[1][2])
    assert results[0][0] != results[2][0]
    assert results[0][1] != results[2][1]


def test_training_leaves_the_global_generators_and_the_data_alone(small, make_model, train_briefly, assert_same):
    before = small.copy()
    state = torch.get_rng_state(), np.random.get_state()[1]
    AlphaSTomics.setup_anndata(small)
    registered = set(small.uns) - set(before.uns)
    assert registered == {"_scvi_uuid", "_scvi_manager_uuid"}
    model = AlphaSTomics(small, mode="expr_to_pos", d_model=32, n_layers=1, n_heads=2, dropout=0.3)
    train_briefly(model)
    model.sample(n_steps=2)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])
    for key in registered:
        del small.uns[key]
    assert_same(small, before)


def test_scvi_seed_is_honoured(small, make_model, weights_of, monkeypatch):
    explicit = make_model(small, random_state=5)
    default = make_model(small)
    monkeypatch.setattr(scvi.settings, "_seed", None)
    scvi.settings.seed = 5
    seeded = make_model(small)
    assert weights_of(seeded) == weights_of(explicit) != weights_of(default)
    assert seeded.init_params_["non_kwargs"]["random_state"] == 5
    assert weights_of(make_model(small, random_state=0)) == weights_of(default)


# -- history and what scvi users expect ---------------------------------------------------------------------------------


def test_history_is_kept_and_continued(small, make_model, train_briefly):
    model = make_model(small)
    train_briefly(model, max_epochs=2)
    first = {name: table.copy() for name, table in model.history.items()}
    assert {"train_loss", "train_diffusion", "train_aligned", "train_distance", "train_neighbour"} <= set(first)
    for name, table in first.items():
        assert isinstance(table, pd.DataFrame)
        assert list(table.columns) == [name]
        assert table.index.tolist() == [0, 1]
        assert table.index.name == "epoch"
        assert np.isfinite(table.to_numpy()).all()
    train_briefly(model, max_epochs=1, validation_size=0.5)
    for name, table in first.items():
        assert model.history[name].index.tolist() == [0, 1, 2]
        pd.testing.assert_frame_equal(model.history[name].iloc[:2], table)
    assert model.history["validation_loss"].index.tolist() == [2]


def test_continued_training_trains(small, make_model, train_briefly, weights_of):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(all(module.training for module in pl_module.modules()))

    model = train_briefly(make_model(small, dropout=0.5), callbacks=[Watch()])
    before = weights_of(model)
    assert not model.module.training
    train_briefly(model, callbacks=[Watch()])
    assert seen == [True] * 2
    assert not any(module.training for module in model.module.modules())
    assert weights_of(model) != before


def test_scvi_views(small, make_model, train_briefly, capsys):
    model = make_model(small)
    assert "Not Trained" in model.summary_string
    assert repr(model) == ""
    assert "60 genes, 2D, 2 reference slices" in capsys.readouterr().out.replace("\n", "")
    train_briefly(model)
    assert model.summary_string.endswith("Training status: Trained")
    assert f"{sum(p.numel() for p in model.module.parameters()):,} parameters" in model.summary_string
    capsys.readouterr()
    model.view_anndata_setup()
    shown = capsys.readouterr().out
    for text in ("'frame': 'slice'", "adata.obsm['spatial']", "adata.obs['slice_id']", "200"):
        assert text in shown
    assert model.adata_manager.data_registry.position.attr_key == "spatial"
    assert isinstance(model.trainer, pl.Trainer)


def test_log_says_how_much_there_is(small, make_model, train_briefly, caplog):
    model = make_model(small)
    with caplog.at_level(logging.INFO, logger="alphastomics"):
        train_briefly(model)
        model.sample(n_steps=2, n_samples=2)
    assert "Training on 200 cells, 60 genes, 2 slices" in caplog.text
    assert "Placing 200 cells in 2 slices: 2 draws of 2 steps on cpu" in caplog.text


# -- modes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_and_samples_only_what_it_learned(small, make_model, train_briefly, mode):
    model = make_model(small, mode=mode)
    assert model.mode == mode
    train_briefly(model)
    assert finite(model)
    assert np.isfinite(model.history["train_loss"].to_numpy()).all()
    assert ("train_expression" in model.history) == (mode != "expr_to_pos")
    for other in MODES:
        if mode not in ("any", other):
            with pytest.raises(ValueError, match=f"trained with mode='{mode}'.*mode='{other}' or mode='any'"):
                model.sample(mode=other)
    if mode in ("any", "expr_to_pos"):
        assert np.isfinite(model.sample(n_steps=2).obsm["spatial"]).all()


def test_unknown_mode_is_refused(small, make_model):
    with pytest.raises(ValueError, match="mode='positions' is unknown; choose from 'expr_to_pos'"):
        make_model(small, mode="positions")


def test_three_dimensions(train_briefly, make_model):
    adata = asx.datasets.synthetic_tissue(n_slices=2, n_cells=80, n_genes=30, n_dims=3)
    model = train_briefly(make_model(adata))
    hidden = adata.copy()
    hidden.obsm["spatial"][:40] = np.nan
    assert model.sample(adata, n_steps=2).obsm["spatial"].shape == (160, 3)
    result = model.sample(hidden, n_steps=2, inpaint=True, n_samples=2, reduce="medoid").obsm["spatial"]
    assert result[40:].tobytes() == adata.obsm["spatial"][40:].tobytes()
    assert np.isfinite(result).all()


@pytest.mark.parametrize("arguments", [{"precision": "auto"}, {"precision": "bf16-mixed"}, {"context_kind": "patch"}])
def test_other_ways_to_train(small, make_model, train_briefly, arguments):
    model = train_briefly(make_model(small), context_size=32, limit_train_batches=3, **arguments)
    assert finite(model)
    assert all(tensor.dtype == torch.float32 for tensor in model.module.parameters())
    assert np.isfinite(model.sample(n_steps=2).obsm["spatial"]).all()


# -- when to stop -------------------------------------------------------------------------------------------------------


def test_early_stopping_holds_out_a_slice(small, make_model, train_briefly):
    model = make_model(small)
    train_briefly(model, max_epochs=30, early_stopping=True, early_stopping_patience=2, early_stopping_min_delta=1e9)
    assert model.history["validation_loss"].index.tolist() == [0, 1, 2]
    assert model.history["train_loss"].index.tolist() == [0, 1, 2]
    data = model.trainer.datamodule
    used = [
        {int(dataset[i].slice_index) for i in range(len(dataset))} for dataset in (data.train_set, data.validation_set)
    ]
    assert used == [{0}, {1}]


def test_early_stopping_needs_two_slices(small, make_model, train_briefly):
    model = make_model(small[:100].copy())
    with pytest.raises(ValueError, match="holds out whole slices, and there is only one"):
        train_briefly(model, early_stopping=True)
    assert not model.is_trained_


@pytest.mark.parametrize("max_time", [0.5, "00:00:00:01", timedelta(seconds=0.5), {"seconds": 0.5}])
def test_max_time(small, make_model, train_briefly, max_time):
    model = make_model(small, d_model=16, n_layers=1)
    start = time.monotonic()
    train_briefly(model, max_epochs=None, max_time=max_time)
    assert time.monotonic() - start < 30
    assert model.is_trained_
    assert model.trainer.global_step > 0
    assert model.trainer.max_epochs == -1


@pytest.mark.parametrize(
    ("max_time", "message"),
    [("5 minutes", "DD:HH:MM:SS"), ("00:05:00", "DD:HH:MM:SS"), (0, "positive"), (-1, "positive")],
)
def test_bad_max_time_is_refused(small, make_model, train_briefly, max_time, message):
    with pytest.raises(ValueError, match=message):
        train_briefly(make_model(small), max_time=max_time)


def test_one_number_of_epochs_when_nothing_is_said(small, make_model, train_briefly):
    model = train_briefly(make_model(small), max_epochs=None, callbacks=[Stop(1)])
    assert model.trainer.max_epochs == 2000  # one step an epoch
    assert model.trainer.global_step == 1


# -- when it ends badly -------------------------------------------------------------------------------------------------


def break_losses(monkeypatch, step, change):
    """Let the losses of one step go through `change`."""
    losses, calls = TrainingPlan.losses, []

    def broken(self, batch, **kwargs):
        result = losses(self, batch, **kwargs)
        calls.append(0)
        return change(result) if len(calls) == step + 1 else result

    monkeypatch.setattr(TrainingPlan, "losses", broken)


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
