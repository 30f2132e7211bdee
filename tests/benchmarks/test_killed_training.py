"""A training that is killed again and again, and what is left of it when it has finished."""

from __future__ import annotations

import random

import pytest
from benchmarks.killed_training import Kill, finish, kill, plan, read_log

from benchmarks import killed_training


def test_all_kinds_of_kills_are_planned_and_always_the_same():
    kills = plan(3, 4, 10, random.Random(0))
    assert [(how.devices, how.victim) for how in kills] == [
        (1, None), (1, None), (1, None), (2, None), (2, 1), (2, 0), (2, None),
    ]  # fmt: skip
    assert all(1 <= how.step < 10 for how in kills)
    assert kills == plan(3, 4, 10, random.Random(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((Kill(1, 8, 0.0, None), Kill(1, 20, 0.01, None)), id="one process"),
        pytest.param((Kill(2, 8, 0.0, None), Kill(2, 20, 0.01, 1)), id="two processes"),
    ],
)
def test_killed_training_ends_as_an_uninterrupted_one(tmp_path, kills):
    devices = kills[0].devices
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    truth = finish(tmp_path / "undisturbed", devices)
    folder = tmp_path / "killed"
    for how in kills:
        ended = kill(folder, how)
        assert ended["status"] != 0
        assert ended["left_over"] == 0
        assert ended["seconds_to_end"] < killed_training.BOUND
        assert (folder / "last.ckpt").is_file()
    if devices == 2:  # the other process logs a remedy
        assert "Another process" in read_log(folder)
        assert "resume='last'" in read_log(folder)
    assert finish(folder, devices) == truth
