"""Contexts that grow, batches in parts, memory that is estimated and fitted: through ``model.train``."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from alphastomics.data import Augmentation
from alphastomics.model import AlphaSTomics
from alphastomics.train.memory.layout import fits_in_memory
from callbacks import Watch
from small_models import GROWING

TRIED = [("full", None), ("neighbor", "factorized"), ("neighbor", None), ("linear", None)]
PLAIN = {"augmentation": Augmentation(gene_dropout=0.0, rotate=False)}
# -- contexts that grow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "cosine", "quadratic", "geometric"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_every_cell_comes_once_in_an_epoch_at_every_length(small, make_model, train_briefly, kind, num_workers):
    watch = Watch()
    train_briefly(
        make_model(small),
        max_epochs=6,
        callbacks=[watch],
        num_workers=num_workers,
        **GROWING | {"context_growth": kind},
    )
    lengths = []
    for batches in watch.of_epochs().values():
        cells = [cell for _, _, some, _ in batches for cell in some]
        assert len(cells) == sum(watch.counts[step] for step, *_ in batches)
        assert sorted(cells) == list(range(200))
        lengths.append(max(longest for _, longest, _, _ in batches))
    assert lengths[0] == 20
    assert lengths[-1] == 100
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3


def test_progress_grows_evenly_over_epochs_of_different_lengths(reference, make_model, train_briefly):
    """Patches: an epoch of short contexts has fewer steps, because every cell is a center once."""
    watch = Watch()
    arguments = GROWING | {"context_kind": "patch", "max_epochs": 4, "growth_steps": 60}
    train_briefly(make_model(reference[:60].copy()), callbacks=[watch], **arguments)
    epochs = watch.of_epochs()
    assert len({len(batches) for batches in epochs.values()}) > 1
    for epoch, batches in epochs.items():
        expected = (epoch + np.arange(len(batches)) / len(batches)) / 4
        np.testing.assert_allclose([progress for *_, progress in batches], expected)


def test_progress_follows_the_steps_where_they_end_the_training(small, make_model, train_briefly):
    watch = Watch()
    train_briefly(make_model(small), callbacks=[watch], **GROWING | {"max_epochs": 100, "max_steps": 10})
    np.testing.assert_allclose([progress for *_, progress in watch.seen], np.arange(10) / 10)
    watch = Watch()
    timed = GROWING | {"max_epochs": -1, "max_steps": 4, "max_time": 1000}
    train_briefly(make_model(small), callbacks=[watch], **timed)
    np.testing.assert_allclose(
        [progress for *_, progress in watch.seen], np.arange(4) / 4, atol=1e-2
    )  # the timestep runs too


def test_contexts_grow_over_half_of_the_training_by_default(small, make_model, train_briefly, caplog):
    arguments = GROWING | {"growth_steps": None, "max_epochs": 10}
    with caplog.at_level(logging.INFO, "alphastomics"):
        train_briefly(make_model(small), **arguments)
    assert re.search("20 to 100 cells.*linear.*10 steps", caplog.text)


def test_validation_keeps_its_contexts(small, make_model, train_briefly):
    class Seen(pl.Callback):
        def on_validation_batch_start(self, trainer, plan, batch, *_):
            shapes.append(tuple(batch.mask.shape))

    shapes = []
    adata = small.copy()
    train_briefly(make_model(adata), max_epochs=4, validation_size=0.5, callbacks=[Seen()], **GROWING)
    assert shapes == [(1, 100)] * 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"growth_steps": 5}, "context_growth="),
        ({"shortest_context": 20}, "context_growth="),
        ({"context_growth": "linear", "shortest_context": 300}, "shortest_context=300.*context_size="),
        ({"context_growth": "linear", "max_epochs": None, "max_time": 10}, "growth_steps="),
        ({"context_growth": "cubic"}, "'cubic'"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"micro_batch_size": 64}, "64 cells"),
        ({"memory_budget": 0}, "memory_budget=0"),
        ({"recompute": "some"}, "recompute='some'"),
        ({"recompute": 3}, "recompute=3|0 to 2"),
        ({"recompute": True}, "recompute=True"),
    ],
)
def test_invalid_arguments_raise(small, make_model, train_briefly, arguments, message):
    model = make_model(small)
    with pytest.raises(ValueError, match=message):
        train_briefly(model, **arguments)
    assert not model.is_trained


# -- batches in parts --------------------------------------------------------------------------------------------------


class Gradients(pl.Callback):
    """The gradient of the first step, before it is clipped."""

    def on_before_optimizer_step(self, trainer, plan, optimizer):
        if trainer.global_step == 0:
            self.found = {name: p.grad.clone() for name, p in plan.named_parameters() if p.grad is not None}


def first_gradient(model, train_briefly, **arguments):
    gradients = Gradients()
    train_briefly(model, max_epochs=1, callbacks=[gradients], **PLAIN | arguments)
    return gradients.found, model.trainer


@pytest.mark.parametrize("mode", ["expr_to_pos", "any"])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(small, make_model, train_briefly, mode):
    """To sixteen roundings in single precision, relative to its norm."""
    sizes = {"context_size": 50, "batch_size": 200}
    whole, trainer = first_gradient(make_model(small, mode=mode), train_briefly, **sizes)
    parts, other = first_gradient(make_model(small, mode=mode), train_briefly, micro_batch_size=50, **sizes)
    assert trainer.global_step == other.global_step == 1
    assert other.num_training_batches == 4 * trainer.num_training_batches
    assert whole.keys() == parts.keys()
    norm = torch.nn.utils.get_total_norm(whole.values())
    difference = torch.nn.utils.get_total_norm([whole[name] - parts[name] for name in whole])
    assert float(difference) <= 16 * torch.finfo(torch.float32).eps * float(norm)


def test_parts_multiply_accumulate_grad_batches(small, make_model, train_briefly):
    sizes = {"context_size": 25, "batch_size": 50, "accumulate_grad_batches": 2}
    model = train_briefly(make_model(small), micro_batch_size=25, **sizes)
    assert (model.trainer.num_training_batches, model.trainer.global_step) == (8, 2)


def test_accumulation_follows_the_length(small, make_model, train_briefly):
    """A step takes 100 cells of which 60 are held at once: 5 contexts of 20 in two parts, 2 of 50 in two, 1 of 60."""

    class Accumulation(pl.Callback):
        def on_train_batch_start(self, trainer, plan, batch, _):
            seen.append((int(batch.mask.sum(1).max()), batch.mask.shape[0], trainer.accumulate_grad_batches))

    seen = []
    train_briefly(
        make_model(small),
        max_epochs=8,
        callbacks=[Accumulation()],
        micro_batch_size=60,
        **GROWING | {"context_size": 60},
    )
    assert seen[0] == (20, 3, 2)
    assert all(longest * contexts <= 60 for longest, contexts, _ in seen)
    assert {parts for *_, parts in seen} == {1, 2}


# -- memory ------------------------------------------------------------------------------------------------------------


def losses_of(model):
    return model.history["train_loss"]["train_loss"].to_numpy()


def test_recomputed_blocks_give_the_same_losses(small, make_model, train_briefly):
    """To the bit, with dropout."""
    losses = [
        losses_of(train_briefly(make_model(small, dropout=0.2), max_epochs=4, recompute=k)) for k in ("none", 1, "all")
    ]
    assert np.array_equal(losses[0], losses[1])
    assert np.array_equal(losses[0], losses[2])


def test_recomputed_blocks_really_run_twice(small, make_model, train_briefly):
    model = make_model(small)
    calls = []
    forward = model.module.blocks[1].attention.forward
    model.module.blocks[1].attention.forward = lambda *args: calls.append(torch.is_grad_enabled()) or forward(*args)
    train_briefly(model, recompute="all")
    twice = sum(calls)
    calls.clear()
    train_briefly(model, recompute="none")
    assert twice == 2 * sum(calls) > 0


def test_the_log_has_the_estimate_and_the_memory_budget(small, make_model, train_briefly, caplog):
    with caplog.at_level(logging.INFO, "alphastomics"):
        train_briefly(make_model(small), memory_budget=3.5)
    assert "less than 0." in caplog.text
    assert "3.50 GiB" in caplog.text


def peak(model, **arguments):
    arguments = {"precision": "32-true", "accelerator": "cpu"} | arguments
    return model.estimate_memory(50, **arguments).peak / 2**30


@pytest.mark.slow
def test_smaller_parts_and_recomputed_blocks_fit_the_memory(small, make_model, train_briefly, caplog):
    model = make_model(small, n_layers=4)
    sizes = {"context_size": 50, "batch_size": 200}
    # The gradients of an earlier part come on top.
    accumulated = sum(p.numel() for p in model.module.parameters()) * 4 / 2**30
    with caplog.at_level(logging.INFO, "alphastomics"):
        train_briefly(model, memory_budget=peak(model, batch_size=50) + accumulated, **sizes)
        assert "1 of 4 contexts" in caplog.text
        assert "recomputed" not in caplog.text
        assert model.trainer.accumulate_grad_batches == 4
        train_briefly(model, memory_budget=peak(model, batch_size=50, recompute=3) + accumulated, **sizes)
    assert "3 of 4 blocks" in caplog.text
    assert "(parameters " in caplog.text


@pytest.mark.slow
def test_too_long_contexts_raise_with_what_would_fit(small, make_model, train_briefly):
    model = make_model(small)
    budget = peak(model, batch_size=50, recompute="all")
    with pytest.raises(ValueError, match=r" 100 cells.* 2 blocks.* \d\d cells") as error:
        train_briefly(model, context_size=100, memory_budget=budget)
    assert "memory_budget=" in str(error.value)
    fitting = int(re.findall(r"(\d+) cells", str(error.value))[-1])
    train_briefly(model, context_size=fitting, batch_size=fitting, memory_budget=budget)
    with pytest.raises(ValueError, match="0 of 2 blocks"):
        train_briefly(model, context_size=100, memory_budget=budget, recompute="none")


@pytest.mark.slow
def test_automatic_contexts_are_whole_slices_or_as_long_as_fits(small, make_model, train_briefly, caplog):
    model = make_model(small)
    with caplog.at_level(logging.INFO, "alphastomics"):
        train_briefly(model, context_size="auto", batch_size=64)
        assert "Contexts of 100 cells" in caplog.text
        assert model.trainer.datamodule.contexts_per_batch == 1
        budget = peak(model, batch_size=50, recompute="all")
        train_briefly(model, context_size="auto", batch_size=64, memory_budget=budget)
    size = model.trainer.datamodule.train_set.context_size
    assert 48 <= size <= 52


def test_batches_grow_with_whole_slices(small, make_model, train_briefly):
    watch = Watch()
    growth = {"context_growth": "linear", "shortest_context": 20, "growth_steps": 8}
    train_briefly(
        make_model(small), context_size="auto", batch_size=40, max_epochs=4, callbacks=[watch], **growth, **PLAIN
    )
    first, *_, last = watch.of_epochs().values()
    assert {(longest, len(cells)) for _, longest, cells, _ in first} == {(20, 40)}
    assert {(longest, len(cells)) for _, longest, cells, _ in last} == {(100, 100)}


@pytest.mark.parametrize("many", [False, True])
def test_automatic_contexts_choose_attention_by_the_largest_slice(small, make_model, train_briefly, monkeypatch, many):
    monkeypatch.setattr("alphastomics.train.defaults.FULL_CELLS", 99 if many else 100)
    model = make_model(small, context="auto")
    config = model.module.config
    assert (config.attention, config.pair_features) == (("neighbor", "factorized") if many else ("full", None))
    train_briefly(model, context_size=None)
    assert model.trainer.datamodule.train_set.context_size == 100
    monkeypatch.setattr("alphastomics.train.defaults.FULL_CELLS", 100 if many else 99)
    again = AlphaSTomics(model.adata, **model.init_params_["non_kwargs"])
    assert again.module.config == config


def test_automatic_contexts_choose_what_fits(small, make_model, monkeypatch):
    found = []

    def fits(config, n_cells, **_):
        found.append((config.attention, config.pair_features, n_cells))
        return config.attention == "linear"

    monkeypatch.setattr("alphastomics.model._model.fits_in_memory", fits)
    assert make_model(small, context="auto").module.config.attention == "linear"
    assert found == [(kind, pairs, 100) for kind, pairs in TRIED]


def test_little_memory_gives_short_contexts(small, make_model, monkeypatch):
    config, arguments = make_model(small).module.config, {"mode": "expr_to_pos"}
    assert fits_in_memory(config, 100, **arguments)
    monkeypatch.setattr("alphastomics.train.memory.layout.usable_memory", lambda *_, **__: 1000)
    assert not fits_in_memory(config, 100, **arguments)


def test_a_system_that_does_not_report_its_memory_requires_a_budget(small, make_model, train_briefly, monkeypatch):
    def unknown(*_, **__):
        raise ValueError("the system does not report its memory")

    monkeypatch.setattr("alphastomics.train.memory.layout.usable_memory", unknown)
    with pytest.raises(ValueError, match="memory_budget="):
        train_briefly(make_model(small))


def test_arguments_chosen_by_automatic_contexts_raise(small, make_model):
    for given in ({"attention": "linear"}, {"attention": "neighbor", "pair_features": "factorized"}):
        with pytest.raises(ValueError, match="context='auto'.*attention="):
            make_model(small, context="auto", **given)
    with pytest.raises(ValueError, match="context='whole'"):
        make_model(small, context="whole")
    assert make_model(small, context="slice", attention="linear").module.config.attention == "linear"


def test_a_context_longer_than_a_batch_is_cut_with_a_warning(small, make_model, train_briefly, caplog):
    train_briefly(make_model(small), context_size=80, batch_size=40)
    assert re.search("context_size=80.*batch_size=40", caplog.text)


def test_estimates_follow_the_arguments(small, make_model):
    model = make_model(small, mode="any", enable_masking=True)
    usual = model.estimate_memory(100, accelerator="cpu", precision=32)
    assert usual.peak == model.estimate_memory(100, 1099, accelerator="cpu", precision=32).peak
    assert usual.peak > model.estimate_memory(100, 100, accelerator="cpu", precision=32).peak
    assert usual.peak > model.estimate_memory(100, accelerator="cpu", precision=32, recompute="all").peak
    assert usual.peak > model.estimate_memory(100, accelerator="cpu", precision=32, training=False).peak
    called = [model.estimate_memory(100, precision=name, training=False) for name in ("32-true", "bf16-mixed")]
    assert called[0] == called[1], "sampling is in 32 bits"
    for wrong in ({"n_cells": 0}, {"batch_size": 0}, {"recompute": "auto"}, {"recompute": 9}):
        with pytest.raises(ValueError, match=r"at least 1|recompute="):
            model.estimate_memory(**wrong)
    for training in (True, False):
        with pytest.raises(TypeError, match="unexpected keyword argument 'foo'; leave it out"):
            model.estimate_memory(100, training=training, plan_kwargs={"foo": 1})


# Trains one step on all cells as one context, and prints what the model estimates and what the step takes beyond what is
# there before it.
MEASURE = """
import json, sys
import lightning.pytorch as pl
from alphastomics.datasets import synthetic_tissue
from alphastomics.model import AlphaSTomics

def of(name):
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(name))

class Peak(pl.Callback):
    def on_train_batch_start(self, trainer, plan, batch, _):
        assert batch.mask.shape == (1, n_cells)
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")  # the peak is what is there
        self.before = of("VmRSS")

    def on_train_batch_end(self, *_):
        print(json.dumps([plain.peak - plain.parameters, of("VmHWM") - self.before]))
        sys.stdout.flush()

n_cells = 6000
adata = synthetic_tissue(n_slices=1, n_cells=n_cells, n_genes=100, random_state=0)
AlphaSTomics.setup_anndata(adata)
model = AlphaSTomics(adata, mode="expr_to_pos", dropout=0.0)
plan = {"modality_dropout": 1.0}
arguments = {"accelerator": "cpu", "precision": "32-true", "plan_kwargs": plan}
plain = model.estimate_memory(n_cells, **arguments)
quiet = {"enable_progress_bar": False, "max_epochs": 1, **arguments}
model.train(context_size=50, batch_size=50, max_steps=2, **quiet)
model.train(context_size="auto", callbacks=[Peak()], **quiet)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not report peak memory")
def test_an_estimate_is_within_15_percent_of_training(tmp_path):
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", MEASURE],
        env=os.environ | allocator,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    estimated, measured = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("[")))
    assert abs(estimated / measured - 1) < 0.15
