"""Links to files of the repository lead to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
REPOSITORY = re.compile(r"https://github\.com/alphastomics/alphastomics/(?:blob|tree)/main/([^)#\s]*)")
RELATIVE = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_file_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = [ROOT / path for path in REPOSITORY.findall(text)] + [page.parent / path for path in RELATIVE.findall(text)]
    assert [str(file) for file in files if not file.exists()] == []


def test_named_tests_exist() -> None:
    """On the page of the requirements of scverse, a test is the proof of a row."""
    named = re.findall(
        r"`(tests/[\w/.]+|\.readthedocs\.yaml)`", (ROOT / "docs" / "scverse.md").read_text(encoding="utf-8")
    )
    assert len(named) >= 3
    assert [name for name in named if not (ROOT / name).exists()] == []
