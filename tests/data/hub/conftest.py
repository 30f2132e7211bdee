from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_other_network(no_other_network) -> None:
    """Whatever a test here does, it speaks with no other computer."""
