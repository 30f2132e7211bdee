"""Nothing that is trained or sampled writes where it was not asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is trained or sampled leaves nothing in the working directory."""
    folder = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []
