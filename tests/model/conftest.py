"""Fixtures of the tests of the model class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _nothing_is_left(empty_folder: Path) -> None:
    """Tests run in an empty folder, which must stay empty."""
