"""Training on two processes that is interrupted: both end, the message has a remedy, and the checkpoint is complete."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from alphastomics.train.distributed import launch as watch
from alphastomics.train.distributed.launch import ProcessWatchdog, death_message, is_connection_error

PROGRAM = Path(__file__).with_name("stop_program.py")
LIMIT = 120  # seconds
STEP = 5  # of the program, at which something happens


class Ended(NamedTuple):
    status: int
    said: str
    seconds: float  # from the end of the first process to that of the last


def members(session: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=", "-s", str(session)], stdout=subprocess.PIPE, text=True, check=False
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [int(number) for number, state in rows if not state.startswith("Z")]


def run(folder: Path, strategy: str, how: str) -> Ended:
    """Run the program, and see that it leaves no process behind."""
    command = [sys.executable, str(PROGRAM), str(folder), strategy, how]
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "MASTER_PORT")}
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment | {"OMP_NUM_THREADS": "1"}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        process.wait(LIMIT)
        began = time.monotonic()
        while members(process.pid) and time.monotonic() < began + 60:
            time.sleep(0.1)
        seconds = time.monotonic() - began
        assert members(process.pid) == [], log.read_text()[-3000:]
    finally:
        for number in members(process.pid):
            os.kill(number, signal.SIGKILL)
    return Ended(process.returncode, log.read_text(), seconds)


def step_of(folder: Path) -> int:
    """Of the checkpoint, which is whole."""
    assert not (folder / ".last.tmp.ckpt").exists()
    return torch.load(folder / "last.ckpt", weights_only=True)["global_step"]


REMEDY = "resume='last'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "how", "names"),
    [
        ("ddp", "second_dies_while_first_waits", ["Process 1", "SIGKILL", REMEDY]),
        ("ddp", "first_dies_while_second_waits", ["Process 0", REMEDY]),
        ("ddp_fork", "second_dies", ["Process 1", "SIGKILL", REMEDY]),
        ("ddp", "memory", ["Memory", "30 cells", "recompute='all'", REMEDY]),
        ("ddp_fork", "memory", ["Memory", "30 cells", "Process 1"]),
        ("ddp", "disk", ["last.ckpt", REMEDY]),
        ("ddp", "terminated", ["SIGTERM at step 6"]),
    ],
)  # fmt: skip
def test_all_processes_end_with_a_remedy(tmp_path, strategy, how, names):
    ended = run(tmp_path, strategy, how)
    assert ended.status != 0
    assert ended.seconds < 30
    for name in names:
        assert name in ended.said, ended.said[-3000:]
    assert step_of(tmp_path) == (STEP + 1 if how == "terminated" else STEP - 1)
    assert ended.status == (128 + signal.SIGTERM if how == "terminated" else -9 if "first_dies" in how else 1)


@pytest.mark.slow
def test_processes_end_with_their_parent(tmp_path):
    ended = run(tmp_path, "ddp_fork", "parent_dies")
    assert ended.status == -signal.SIGKILL
    assert step_of(tmp_path) >= STEP - 1


@pytest.mark.slow
def test_max_time_ends_both_processes_after_the_same_step(tmp_path):
    """In the midst of an epoch, where the training goes on."""
    ended = run(tmp_path, "ddp", "time")
    assert ended.status == 0, ended.said[-3000:]
    assert ended.said.count("stopped 1 1") == 2
    assert ended.said.count("resumed 4 2") == 2


@pytest.mark.slow
def test_processes_with_different_checkpoints_raise(tmp_path):
    ended = run(tmp_path, "ddp", "apart")
    assert ended.status == 1
    assert re.search("step 2 in process 0, 0 in process 1.*checkpoint=", ended.said)


# -- parts -------------------------------------------------------------------------------------------------------------


def test_errors_of_lost_connections_are_recognized():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1234"
    assert is_connection_error(RuntimeError(gloo))
    assert is_connection_error(dist.DistNetworkError("no answer"))
    assert not is_connection_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_connection_error(ValueError("gloo"))


def test_a_killed_process_is_reported_with_its_signal():
    assert re.match("Process 1 .*SIGKILL", death_message("Process 1", -9))
    assert re.match("Process 1 .*exit code 3", death_message("Process 1", 3))


def test_other_processes_may_end_on_their_own(monkeypatch):
    """Nothing is ended before the time is over, and nothing once the training is."""
    monkeypatch.setattr(watch, "SECONDS", 0.01)
    monkeypatch.setattr(watch, "GRACE", 0.5)
    monkeypatch.setattr(watch, "_children", [subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])])
    ends = []
    monkeypatch.setattr(os, "_exit", ends.append)
    watch._children[0].wait()
    with ProcessWatchdog():
        time.sleep(0.1)
    time.sleep(0.6)
    assert ends == []
    with ProcessWatchdog():
        time.sleep(0.8)
    assert ends[0] == 1


def test_only_launched_processes_watch_a_parent(monkeypatch):
    monkeypatch.delenv(watch.LAUNCHER, raising=False)
    assert ProcessWatchdog().parent == 0
    assert ProcessWatchdog()._find_dead() is None
    assert ProcessWatchdog(os.getppid())._find_dead() is None
    assert "Process 0" in ProcessWatchdog(os.getppid() + 1)._find_dead()
