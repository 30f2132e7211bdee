"""Fixtures of checkpoints, resumed and interrupted trainings."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from alphastomics.train.checkpoint import LastCheckpoint
from callbacks import AtStep

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from anndata import AnnData

    from alphastomics.model import AlphaSTomics


@pytest.fixture(autouse=True)
def _nothing_is_left(empty_folder: Path) -> None:
    """Tests run in an empty folder, which must stay empty."""


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every step; that of the last step of an epoch is written when the epoch is over."""
    make = LastCheckpoint.__init__

    def make_for_every_step(self: LastCheckpoint, path: Any, description: Any, every: int) -> None:
        make(self, path, description, 1)

    monkeypatch.setattr(LastCheckpoint, "__init__", make_for_every_step)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the checkpoint is written."""
    return tmp_path / "last.ckpt"


@pytest.fixture
def model(small: AnnData, make_model: Callable) -> AlphaSTomics:
    """A new model of the small tissue."""
    return make_model(small)


@pytest.fixture
def train(small: AnnData, make_model: Callable, train_briefly: Callable) -> Callable[..., AlphaSTomics]:
    """Train a model, or a new one of the small tissue, for a moment."""

    def run(model: AlphaSTomics | None = None, **arguments: Any) -> AlphaSTomics:
        return train_briefly(model or make_model(small), **arguments)

    return run


@pytest.fixture
def die(train: Callable) -> Callable[..., None]:
    """Train a model that fails before a step, with a checkpoint."""

    def fail(*_: Any) -> None:
        raise OSError("dead")

    def run(path: Path, model: AlphaSTomics | None = None, *, step: int, **arguments: Any) -> None:
        with pytest.raises(OSError, match="dead"):
            train(model, checkpoint=path, callbacks=[AtStep(step, fail)], **arguments)

    return run


@pytest.fixture
def step_of() -> Callable[[Path], int]:
    """The step of a checkpoint, which lies alone in its folder."""

    def read(path: Path) -> int:
        assert [each.name for each in path.parent.iterdir()] == [path.name]
        return torch.load(path, weights_only=True)["global_step"]

    return read


@pytest.fixture(scope="session")
def _finished(_reference: AnnData, make_model: Callable, train_briefly: Callable, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("finished") / "last.ckpt"
    train_briefly(make_model(_reference[np.r_[0:100, 300:400]].copy()), checkpoint=path)
    return path


@pytest.fixture
def finished(_finished: Path, path: Path) -> Path:
    """The checkpoint of one epoch of the small tissue; the test may change it."""
    return shutil.copy(_finished, path)
