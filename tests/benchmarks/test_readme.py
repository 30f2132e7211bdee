from __future__ import annotations

import pytest
from benchmarks._data import ROOT
from benchmarks.readme import PLANES, calibration_table, comparison, model_table, tables


def test_the_figures_of_the_readme_match_the_results():
    assert tables() in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("tissue", PLANES)
def test_the_figures_of_the_design_notes_match_the_results(tissue):
    assert model_table(tissue) in (ROOT / "docs" / "design-notes.md").read_text()


@pytest.mark.parametrize("tissue", [name for name in PLANES if comparison(name)])
def test_the_comparison_in_the_design_notes_matches_the_results(tissue):
    assert comparison(tissue) in (ROOT / "docs" / "design-notes.md").read_text()


def test_the_calibration_in_the_design_notes_matches_the_results():
    assert calibration_table() in (ROOT / "docs" / "design-notes.md").read_text()
