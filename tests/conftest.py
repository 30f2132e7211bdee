"""Fixtures that every test may use; nothing here imports torch."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# One thread per process and no window, decided before NumPy, PyTorch or Matplotlib are first imported. Numba, which scanpy uses, would
# give its number of threads to PyTorch and scikit-learn.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
if "numba" in sys.modules:  # imported by a plugin
    sys.modules["numba"].config.reload_config()

import numpy as np
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anndata import AnnData

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
pytest_plugins = ["hub_stand_in", "small_models"]

# The same examples in every run, and no deadline: a busy machine is not a failure.
settings.register_profile("alphastomics", deadline=None, derandomize=True)
settings.load_profile("alphastomics")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real tissues: ``ALPHASTOMICS_DATA``, or ``shared/data`` beside the repository."""
    named = os.environ.get("ALPHASTOMICS_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real tissues at {folder}; set ALPHASTOMICS_DATA to their folder")
    return folder


@pytest.fixture(scope="session")
def _tissue() -> AnnData:
    from alphastomics.datasets import synthetic_tissue

    return synthetic_tissue(n_slices=3, n_cells=120, n_genes=30, random_state=0)


@pytest.fixture
def tissue(_tissue: AnnData) -> AnnData:
    """Three small slices with counts, positions and cell types; the test may change it."""
    return _tissue.copy()
