"""Fixtures of checkpoints, resumed and interrupted trainings."""

from __future__ import annotations

from typing import Any

import pytest

from alphastomics.train.checkpoint import LastCheckpoint


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every step; that of the last step of an epoch is written when the epoch is over."""
    make = LastCheckpoint.__init__

    def make_for_every_step(self: LastCheckpoint, path: Any, description: Any, every: int) -> None:
        make(self, path, description, 1)

    monkeypatch.setattr(LastCheckpoint, "__init__", make_for_every_step)
