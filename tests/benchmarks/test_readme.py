from __future__ import annotations

import pytest
from benchmarks._data import ROOT
from benchmarks.readme import (
    PLANES,
    calibration_table,
    comparison,
    lever_table,
    model_table,
    peer_table,
    result_tables,
    tables,
)


def test_the_figures_of_the_readme_match_the_results():
    assert tables() in (ROOT / "README.md").read_text()


def test_the_tables_of_the_page_match_the_results():
    page = (ROOT / "docs" / "results.md").read_text()
    comparisons = [comparison(tissue) for tissue in PLANES]
    for table in (*result_tables(), *map(model_table, PLANES), *filter(None, comparisons)):
        assert table in page


def test_the_table_of_published_methods_matches_the_results():
    assert peer_table() in (ROOT / "docs" / "comparison.md").read_text()


@pytest.mark.parametrize("table", [calibration_table, lever_table])
def test_the_tables_of_the_design_notes_match_the_results(table):
    assert table() in (ROOT / "docs" / "design-notes.md").read_text()
