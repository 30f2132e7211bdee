"""The benchmark of time and memory by the number of cells, on few cells."""

from __future__ import annotations

import json

import pytest
from benchmarks._data import ROOT

from benchmarks import size


def test_the_figures_of_the_page_match_the_results():
    assert size.size_table() in (ROOT / "docs" / "arithmetic.md").read_text()


def test_the_table_has_a_row_for_every_size_in_order(tmp_path):
    results = size.Results(tmp_path / "size.json", {"benchmark": "size"})
    for n_cells, seconds in ((20_000, 3.0), (500, 12.0)):
        scores = {
            "processor": dict.fromkeys(size.STAGES, seconds),
            "seconds": dict.fromkeys(size.STAGES, 1.0),
            "peak": {stage: 2**29 * (i + 1) for i, stage in enumerate(size.STAGES)},
        }
        results.add(parameters={"genes": 9, "steps": 7}, scores=scores, method="m", fold=str(n_cells), seed=0)
    heading, _, head, _, *rows = size.size_table(tmp_path / "size.json").splitlines()
    assert heading.startswith("9 genes")
    assert "7 training steps" in head
    assert [row.split(" | ")[0] for row in rows] == ["| 500", "| 20,000"]
    assert rows[0].endswith("| 72 s | 3.00 GiB |")
    assert rows[1].endswith("| 3.0 s | 18 s | 3.00 GiB |")
    assert all(row.count("|") == head.count("|") for row in rows)


@pytest.mark.slow
def test_every_stage_is_measured_once(tmp_path, monkeypatch):
    out = tmp_path / "size.json"
    arguments = ["--genes", "20", "--steps", "2", "--output", str(out), "--cells"]
    size.main([*arguments, "60"])
    monkeypatch.setattr(size, "run", lambda *_: pytest.fail("the size was already measured"))
    size.main([*arguments, "60"])
    (entry,) = json.loads(out.read_text())["entries"]
    found = entry["scores"]
    assert list(found["processor"]) == list(found["seconds"]) == list(found["peak"]) == list(size.STAGES)
    assert min(found["processor"].values()) > 0
    assert min(found["seconds"].values()) > 0
    assert found["n_steps"] == 2
    assert found["peak"]["setup"] > found["imports"] > 0
    assert max(found["peak"].values()) == found["peak"]["evaluation"]


def test_a_stage_does_not_contain_those_within_it(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr(size.time, "perf_counter", lambda: next(now))
    stages = size.Stages()
    with stages.measure("training"), stages.measure("statistics"):
        pass
    assert stages.seconds == {"statistics": 3.0, "training": 7.0}
