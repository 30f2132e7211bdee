"""Small models that all tests share, each trained once per process; importing this loads no torch."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from anndata import AnnData

    from alphastomics.model import AlphaSTomics

SMALL = {"d_model": 32, "n_layers": 2, "n_heads": 2, "dropout": 0.0}
BRIEF = {
    "context_size": 128,
    "batch_size": 384,
    "precision": "32-true",
    "accelerator": "cpu",
    "enable_progress_bar": False,
}
GROWING = {
    "context_size": 100,
    "batch_size": 100,
    "context_growth": "linear",
    "shortest_context": 20,
    "growth_warmup": 2,
    "growth_steps": 8,
}


@contextmanager
def brief_fits() -> Iterator[None]:
    """Fit statistics on fewer samples, which otherwise takes most of the time of a small model."""
    from alphastomics.sampling import _fit_expression, _fit_perturbation

    with (
        patch.multiple(_fit_expression, MARGINAL_STEPS=8, DEPENDENCE_STEPS=4, DRAWS=1, ROUNDS=1),
        patch.multiple(_fit_perturbation, N_DRAWS=2, SHARES=(0.5,)),
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def _brief() -> Iterator[None]:
    with brief_fits():
        yield


@pytest.fixture(scope="session")
def _reference() -> AnnData:
    from alphastomics.datasets import synthetic_tissue

    return synthetic_tissue(n_slices=3, n_cells=300, n_genes=60, random_state=0)


@pytest.fixture
def reference(_reference: AnnData) -> AnnData:
    """Three slices of 300 cells, unregistered; the test may change it."""
    return _reference.copy()


@pytest.fixture
def small(reference: AnnData) -> AnnData:
    """Two slices of 100 cells: one step an epoch with the batches of `train_briefly`."""
    return reference[np.r_[0:100, 300:400]].copy()


@pytest.fixture(scope="session")
def train_briefly() -> Callable[..., AlphaSTomics]:
    """Train a model for a moment, with other arguments of ``train`` on request."""

    def train(model: AlphaSTomics, **kwargs: Any) -> AlphaSTomics:
        model.train(**(BRIEF | {"max_epochs": 1} | kwargs))
        return model

    return train


@pytest.fixture(scope="session")
def train_well(train_briefly: Callable[..., AlphaSTomics]) -> Callable[[AlphaSTomics], AlphaSTomics]:
    """Train a model for some seconds, until it places cells where they belong."""

    def train(model: AlphaSTomics) -> AlphaSTomics:
        from alphastomics.data import Augmentation

        plan = {"lr": 6e-3, "warmup_steps": 5}
        return train_briefly(model, max_epochs=20, augmentation=Augmentation(), plan_kwargs=plan)

    return train


@pytest.fixture(scope="session")
def make_model() -> Callable[..., AlphaSTomics]:
    """Register a copy of the cells and make a small model of them."""

    def make(adata: AnnData, *, mode: str = "expr_to_pos", setup: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        from alphastomics.model import AlphaSTomics

        adata = adata.copy()
        AlphaSTomics.setup_anndata(adata, **(setup or {}))
        return AlphaSTomics(adata, mode=mode, **(SMALL | kwargs))

    return make


@pytest.fixture(scope="session")
def _trained(_reference: AnnData, make_model: Callable, train_well: Callable) -> AlphaSTomics:
    model = make_model(_reference, setup={"slice_key": "slice_id"})
    return train_well(model)


@pytest.fixture
def trained(_trained: AlphaSTomics) -> Iterator[AlphaSTomics]:
    """The trained model that all tests share; nothing may change its weights."""
    before = weights(_trained)
    yield _trained
    assert weights(_trained) == before, "a test changed the shared model"


@pytest.fixture(scope="session")
def _folder(_trained: AlphaSTomics, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "saved"
    _trained.save(folder)
    return folder


@pytest.fixture
def folder(_folder: Path, tmp_path: Path) -> Path:
    """A saved model; the test may damage it."""
    return shutil.copytree(_folder, tmp_path / "copy")


def weights(model: AlphaSTomics) -> dict[str, bytes]:
    return {name: tensor.cpu().numpy().tobytes() for name, tensor in model.module.state_dict().items()}


@pytest.fixture(scope="session")
def weights_of() -> Callable[[AlphaSTomics], dict[str, bytes]]:
    """The weights of a model, as bytes by name."""
    return weights


@pytest.fixture(scope="session")
def positions_of() -> Callable[[AnnData], bytes]:
    """The positions of a sampled AnnData as bytes, after looking that they are positions at all."""

    def read(adata: AnnData) -> bytes:
        positions = adata.obsm["spatial_reconstructed"]
        assert positions.dtype == np.float64
        assert np.isfinite(positions).all()
        assert (positions.std(axis=0) > 1).all()
        return positions.tobytes()

    return read


@pytest.fixture(scope="session")
def assert_same() -> Callable[[AnnData, AnnData], None]:
    """Compare everything that two AnnData hold, to the bit."""

    def same_array(a: Any, b: Any) -> bool:
        if a is None:
            return b is None
        if sp.issparse(a):
            parts = ("data", "indices", "indptr")
            return a.format == b.format and all(same_array(getattr(a, part), getattr(b, part)) for part in parts)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()

    def check(a: AnnData, b: AnnData) -> None:
        assert same_array(a.X, b.X)
        for name in ("obsm", "varm", "layers", "obsp"):
            left, right = getattr(a, name), getattr(b, name)
            assert list(left) == list(right)
            assert all(same_array(left[key], right[key]) for key in left)
        pd.testing.assert_frame_equal(a.obs, b.obs)
        pd.testing.assert_frame_equal(a.var, b.var)
        assert repr(a.uns) == repr(b.uns)

    return check


@pytest.fixture(scope="session")
def train_on(make_model, train_briefly):
    """A small model of some cells, trained for a moment."""

    def train(adata, *, max_epochs=8, **arguments):
        return train_briefly(make_model(adata, **arguments), max_epochs=max_epochs)

    return train


@pytest.fixture(scope="session")
def everything(_reference: AnnData, train_on: Callable[..., AlphaSTomics]) -> AlphaSTomics:
    """A model with ``mode="any"`` that all tests share, with the statistics of sampled expression."""
    model = train_on(_reference, mode="any")
    model._with_expression(model._make_sampler())
    return model


@pytest.fixture(scope="session")
def model_of(_reference: AnnData, train_on: Callable[..., AlphaSTomics]) -> Callable[[str], AlphaSTomics]:
    """A model by its mode, trained for a moment on two slices of 100 cells when it is first needed, that all tests share."""

    @cache
    def get(mode: str) -> AlphaSTomics:
        return train_on(_reference[np.r_[0:100, 300:400]].copy(), mode=mode, max_epochs=2)

    return get


@pytest.fixture
def empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, which must be empty after the test."""
    folder = tmp_path_factory.mktemp("cwd")
    monkeypatch.chdir(folder)
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def places(reference: AnnData) -> AnnData:
    """The second slice of 300 cells; the test may change it."""
    return reference[reference.obs["slice_id"] == "slice_1"].copy()


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is trained."""
    from alphastomics.train import ContextRunner

    monkeypatch.setattr(ContextRunner, "__call__", lambda _: pytest.fail("training was started"))
