"""Tutorials on real tissues read them from ``ALPHASTOMICS_DATA``, and are skipped where the tissues are absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "ALPHASTOMICS_DATA"
FOLDER = Path(os.environ.get(VARIABLE) or Path(__file__).resolve().parents[2] / "shared" / "data").resolve()

# Kernels inherit the environment.
if FOLDER.is_dir():
    os.environ[VARIABLE] = str(FOLDER)
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm, without ipywidgets


def pytest_itemcollected(item: pytest.Item) -> None:
    """Skip a notebook that reads a real tissue if there is no folder of them."""
    if not FOLDER.is_dir() and VARIABLE in item.path.read_text(encoding="utf-8"):
        item.add_marker(pytest.mark.skip(reason=f"no real tissues; set {VARIABLE} to their folder"))
