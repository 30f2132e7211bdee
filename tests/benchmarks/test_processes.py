from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from benchmarks.processes import RESULT, WARM, Pace, summary

from benchmarks import processes


def test_the_ratio_is_the_median_of_pairs():
    found = summary([(10.0, 5.0), (30.0, 20.0), (12.0, 4.0)])
    assert found == {"one": 12.0, "two": 5.0, "ratio": 2.0}


def test_steps_that_warm_up_are_not_counted(monkeypatch):
    clock = iter([*range(0, 100 * WARM, 100), 1000, 2000, 3000])
    monkeypatch.setattr(processes.time, "monotonic", lambda: float(next(clock)))
    pace = Pace()
    for i in range(WARM + 3):
        pace.on_train_batch_end(None, None, None, SimpleNamespace(mask=torch.ones(2, 50 if i < WARM else 500)), i)
    other = Pace()
    other.load_state_dict(pace.state_dict())
    assert other.microseconds(1) == pytest.approx(1e6 * (3000 - 100 * (WARM - 1)) / 3000)
    assert other.microseconds(2) == pytest.approx(other.microseconds(1) / 2)


@pytest.mark.slow
def test_pairs_are_measured_by_turns(tmp_path, capsys):
    out = tmp_path / "processes.json"
    processes.main(["--cells", "600", "--genes", "15", "--steps", "2", "--pairs", "1", "--output", str(out)])
    found = json.loads(out.read_text())
    assert found["summary"]["ratio"] == found["microseconds"]["one"][0] / found["microseconds"]["two"][0]
    assert found["machine"]["torch_threads"] == 1
    assert f"{found['summary']['ratio']:.2f} times as fast" in capsys.readouterr().out


def test_the_committed_result_is_fast_enough():
    if not RESULT.is_file():
        pytest.skip("not measured yet")
    found = json.loads(RESULT.read_text())
    assert len(found["microseconds"]["one"]) == len(found["microseconds"]["two"]) >= 5
    assert found["summary"]["ratio"] >= found["least"]
