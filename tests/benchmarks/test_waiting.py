from __future__ import annotations

import json
import time

import pytest

from benchmarks import waiting


def test_waiting_time_is_that_of_the_iterator():
    def slow(loader):
        for each in loader:
            time.sleep(0.02)
            yield each

    watch = waiting.Stopwatch(slow)
    for _ in watch(range(waiting.WARM + 11)):
        time.sleep(0.02)
    assert 0.4 < watch.share() < 0.6


@pytest.mark.slow
def test_both_ways_to_hold_cells_are_trained(tmp_path):
    out = tmp_path / "waiting.json"
    waiting.main(["--cells", "300", "--genes", "15", "--slices", "2", "--steps", "3", "--output", str(out)])
    found = json.loads(out.read_text())["training"]
    assert set(found) == {"from disk", "in memory"}
    assert all(0 <= each["waiting"] < 1 < each["milliseconds"] for each in found.values())
