"""Comparisons of time with an earlier version."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from benchmarks._earlier import EARLIER, OURS

from benchmarks import _data, _earlier, _timed, speed, time_to_accuracy, unseen

ROOT = Path(__file__).parents[2]


def test_ratios_are_those_of_the_same_round():
    found = speed.ratios({OURS: [1.0, 2.0, 3.0], EARLIER: [2.0, 2.0, 4.0], speed.LUNA: [4.0, 8.0, 12.0]})
    assert found == {EARLIER: 0.75, speed.LUNA: 0.25}


def test_the_package_of_a_commit_is_extracted(tmp_path):
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git repository")
    assert (_earlier.checkout("HEAD", tmp_path) / "alphastomics" / "py.typed").is_file()


@pytest.mark.parametrize("task", ["training", "placement"])
def test_steps_and_placements_are_timed(task):
    assert 0 < _timed.seconds_of(task, 60, 12, _timed.WARM + 4) < 60


def test_finished_placements_are_kept_and_thresholds_found(make_tissue, tmp_path, monkeypatch):
    """A placement reaches the thresholds after 2 minutes by this version, and after 4 by the earlier one."""
    fold, calls, out = _data.make_fold("observed", make_tissue(0), make_tissue(1, n_slices=1)), [], tmp_path / "t.json"

    together = threading.Barrier(2, timeout=60)

    def place(fold, source, seed, minutes):
        together.wait()  # raises unless both versions run at the same time
        calls.append((source.name, minutes))
        good = minutes >= (2 if source.name == "src" else 4)
        return fold.truth if good else np.random.default_rng(0).permutation(fold.truth), 60 * minutes

    monkeypatch.setattr(time_to_accuracy, "place", place)
    monkeypatch.setattr(time_to_accuracy, "checkout", lambda commit, folder: Path("earlier"))
    monkeypatch.setattr(time_to_accuracy, "BASELINES", ("knn_25",))
    monkeypatch.setitem(_data.BENCHMARKS, "seqfish", lambda folder: [fold])
    arguments = ["--tissues", "seqfish", "--data-dir", str(tmp_path), "--output", str(out), "--minutes"]
    time_to_accuracy.main([*arguments, "1", "2", "4"])
    assert sorted(calls) == sorted((version, minutes) for minutes in (1, 2, 4) for version in ("src", "earlier"))
    found = json.loads(out.read_text())
    assert found["reached"] == {OURS: 2.0, EARLIER: 4.0}
    assert {entry["method"] for entry in found["entries"]} == {OURS, EARLIER, "knn_25"}
    time_to_accuracy.main([*arguments, "1", "2", "4"])
    assert len(calls) == 6


def test_the_earlier_version_places_the_suite_without_a_limit_of_time(make_tissue, tmp_path, monkeypatch):
    fold, calls, out = _data.make_fold("observed", make_tissue(0), make_tissue(1, n_slices=1)), [], tmp_path / "e.json"

    def place(fold, source, seed):
        calls.append((source.name, seed))
        return fold.truth, 1.0

    monkeypatch.setattr(_earlier, "checkout", lambda commit, folder: Path("earlier"))
    monkeypatch.setattr(_earlier, "place", place)
    monkeypatch.setitem(_data.BENCHMARKS, "starmap3d", lambda folder: [fold])
    arguments = ["--tissues", "starmap3d", "--methods", EARLIER, "--seeds", "0", "1", "--data-dir", str(tmp_path)]
    for _ in range(2):  # finished placements are kept
        unseen.main([*arguments, "--output", str(out)])
    assert calls == [("earlier", 0), ("earlier", 1)]
    assert {(e["method"], e["scores"]["knn_20"]) for e in json.loads(out.read_text())["entries"]} == {(EARLIER, 1.0)}
