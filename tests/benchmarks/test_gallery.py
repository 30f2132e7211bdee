from __future__ import annotations

import re

from benchmarks._data import ROOT
from benchmarks.gallery import MINUTES

PAGE = ROOT / "docs" / "gallery.md"
LARGEST = 150_000  # bytes


def test_the_page_shows_the_figures_and_states_the_time_of_the_trainings():
    page = PAGE.read_text()
    figures = list((ROOT / "docs" / "_static" / "gallery").iterdir())
    assert set(re.findall(r"\(_static/gallery/([\w.]+)\)", page)) == {path.name for path in figures}
    assert max(path.stat().st_size for path in figures) <= LARGEST
    assert [int(minutes) for minutes in re.findall(r"(\d+) minutes of training", page)] == list(MINUTES.values())
