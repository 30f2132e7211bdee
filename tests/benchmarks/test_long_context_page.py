from __future__ import annotations

import pytest
from benchmarks._data import ROOT
from benchmarks.long_context_page import tables

TABLES = list(tables())


@pytest.mark.parametrize("number", range(len(TABLES)))
def test_the_figures_of_the_page_match_the_results(number):
    assert TABLES[number] in (ROOT / "docs" / "long-context.md").read_text()
