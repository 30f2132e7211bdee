from __future__ import annotations

from benchmarks._data import ROOT
from benchmarks.readme import tables


def test_the_figures_of_the_readme_are_those_of_the_results():
    assert tables() in (ROOT / "README.md").read_text()
