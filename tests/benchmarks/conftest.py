from __future__ import annotations

import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").is_dir():
    collect_ignore_glob = ["test_*.py"]  # the source distribution has the tests, but not the benchmarks
elif str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def gradient_tissue(seed: int, *, n_cells: int = 150, n_slices: int = 2, turn: float = 0.0) -> ad.AnnData:
    """Counts whose rate follows the position, so that a cell can be placed; slices turned by ``turn`` and shifted."""
    rng = np.random.default_rng(seed)
    direction = np.random.default_rng(99).normal(size=(2, 40))
    expression, position, names = [], [], []
    for k in range(n_slices):
        x = rng.uniform(-1, 1, (n_cells, 2)) * [2, 1]
        expression.append(rng.poisson(8 * np.exp(0.8 * x @ direction / np.sqrt(2))))
        angle = k * turn
        rotation = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        position.append(x @ rotation + 5 * k * (turn != 0))
        names += [f"s{k}"] * n_cells
    obs = pd.DataFrame({"slice_id": names, "cell_type": np.where(np.concatenate(position)[:, 0] > 0, "a", "b")})
    obs.index = [f"fov{i}" for i in range(len(obs))]
    tissue = ad.AnnData(np.concatenate(expression).astype(np.float32), obs=obs)
    tissue.obsm["spatial"] = np.concatenate(position)
    return tissue


@pytest.fixture(scope="session")
def make_tissue():
    return gradient_tissue
