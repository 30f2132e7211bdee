"""Fixtures of checkpoints, resumed and interrupted trainings."""

from __future__ import annotations

import pytest


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every step; that of the last step of an epoch is written when the epoch is over."""
    monkeypatch.setattr("alphastomics.train.checkpoint.EVERY", 1)
