"""Cells per second and memory: counted by hand, and where they are shown."""

from __future__ import annotations

import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger

from alphastomics.train import callbacks as module
from alphastomics.train.callbacks import GIB, ThroughputMonitor, peak_memory


class Kept(Logger):
    """Keeps the logged metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self):
        return "kept"

    @property
    def version(self):
        return 0

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


@pytest.fixture
def clock(monkeypatch):
    """A clock that is moved by hand."""
    now = [100.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return now


def log_step(meter, clock, seconds, n_cells, *, world_size=1, shared=1):
    """What is logged after a step of so many seconds with so many cells."""
    logged = {}
    plan = SimpleNamespace(device=torch.device("cpu"), log_dict=lambda values, **_: logged.update(values))
    plan.group_size = shared
    trainer = SimpleNamespace(progress_bar_callback=object(), loggers=[], world_size=world_size)
    clock[0] += seconds
    mask = torch.zeros(2, 50, dtype=torch.bool)
    mask.view(-1)[:n_cells] = True
    meter.on_train_batch_end(trainer, plan, None, SimpleNamespace(mask=mask), 0)
    return logged.get("cells_per_second")


def test_cells_and_seconds_count_from_the_last_log(clock):
    meter = ThroughputMonitor()
    meter.on_train_start(None, None)
    assert log_step(meter, clock, 4.0, 80) == 20.0
    assert log_step(meter, clock, 0.5, 60) is None
    assert log_step(meter, clock, 0.75, 65) == (60 + 65) / 1.25
    assert log_step(meter, clock, 2.0, 10, world_size=4) == 4 * 10 / 2
    assert log_step(meter, clock, 2.0, 10, world_size=4, shared=2) == 2 * 10 / 2


def test_validation_is_left_out(clock):
    meter = ThroughputMonitor()
    meter.on_train_start(None, None)
    log_step(meter, clock, 1.0, 10)
    clock[0] += 50.0
    meter.on_validation_end(None, None)
    assert log_step(meter, clock, 2.0, 30) == 15.0
    clock[0] += 50.0
    meter.on_train_epoch_start(None, None)
    assert log_step(meter, clock, 2.0, 30) == 15.0


@pytest.mark.skipif(not module.STATUS.exists(), reason="the system tells memory in another way")
def test_memory_is_the_peak_of_the_process():
    """An array that is freed again still counts."""
    lines = module.STATUS.read_text().splitlines()
    observed = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    before = peak_memory(torch.device("cpu"))
    assert before >= observed
    block = np.ones((int(before) - observed + 2**28) // 8)
    del block
    assert 0.8 * 2**28 < peak_memory(torch.device("cpu")) - before < 1.5 * 2**28


@pytest.mark.skipif(not module.STATUS.exists(), reason="the system tells memory in another way")
def test_peak_memory_without_proc_status(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "STATUS", tmp_path / "none")
    assert peak_memory(torch.device("cpu")) > 0
    monkeypatch.setitem(sys.modules, "resource", None)
    assert np.isnan(peak_memory(torch.device("cpu")))


def test_peak_memory_on_a_gpu_matches_pytorch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * GIB)
    assert peak_memory(torch.device("cuda")) == 3 * GIB


def test_the_progress_bar_shows_both(make_plan, fit, capsys):
    runner = fit(make_plan(), max_epochs=2, enable_progress_bar=True)
    shown = capsys.readouterr()
    assert re.search(r"Training: 100%.* loss \d+\.\d+, [\d,]+ cells/s, .* GiB", shown.out + shown.err)
    assert runner.trainer.progress_bar_metrics["cells_per_second"] > 0
    assert set(runner.model.history_) == set(runner.trainer.callback_metrics) - {
        "loss",
        "cells_per_second",
        "memory_gib",
    }


def test_losses_rate_and_speed_arrive_in_any_logger(make_plan, fit, monkeypatch):
    monkeypatch.setattr(ThroughputMonitor, "SECONDS", 0.0)
    kept, plan = Kept(), make_plan(lr=1e-3, warmup_steps=4, lr_schedule="constant")
    history = fit(plan, max_epochs=2, logger=kept, data={"validation_size": 0.3}).model.history_
    values = {}
    for step, row in kept.rows:
        for name, value in row.items():
            values.setdefault(name, {})[step] = value
    np.testing.assert_allclose(list(values["lr"].values()), [1e-3 * (n + 1) / 4 for n in range(len(values["lr"]))])
    assert len(values["lr"]) == len(values["loss"]) == len(values["cells_per_second"]) == plan.trainer.global_step
    assert all(value > 0 for value in values["memory_gib"].values())
    for name in ("train_loss", "validation_loss", "train_distance"):
        np.testing.assert_allclose(list(values[name].values()), history[name][name])


def test_a_logger_of_files_writes_its_own_and_nothing_else(make_plan, fit, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    fit(make_plan(), max_epochs=2, logger=CSVLogger(tmp_path / "logs", name="mine"), data={"validation_size": 0.3})
    assert os.listdir(tmp_path / "here") == []
    assert sorted(os.listdir(tmp_path)) == ["here", "logs"]
    header = (tmp_path / "logs/mine/version_0/metrics.csv").read_text().splitlines()[0].split(",")
    assert {"lr", "loss", "train_loss", "validation_loss", "cells_per_second", "memory_gib", "step", "epoch"} <= set(
        header
    )


def test_nothing_is_counted_without_a_logger_and_progress_bar(make_plan, fit):
    runner = fit(make_plan())
    assert "cells_per_second" not in runner.trainer.callback_metrics
    assert "lr" not in runner.trainer.callback_metrics
