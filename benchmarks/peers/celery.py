"""CeLEry (Zhang 2023, doi:10.1038/s41467-023-39895-3): a network of three layers from expression to two coordinates.

Layers, batches of 4 cells and learning rate are the defaults of ``Fit_cord``; expression is normalized, logarithmized and
standardized within each dataset, as in its tutorial. Its 500 epochs are those of 2,000 cells; larger references have the same
number of steps.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

import anndata as ad
import CeLEry
import pandas as pd
import scanpy as sc

if TYPE_CHECKING:
    import numpy as np

EPOCHS, CELLS = 500, 2000


def place(data: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Positions of the query cells."""
    reference, query = (_normalized(data[name], is_counts=bool(data["is_counts"])) for name in ("reference", "query"))
    varying = (reference.X.std(axis=0) > 0) & (query.X.std(axis=0) > 0)
    reference, query = reference[:, varying].copy(), query[:, varying].copy()
    for adata in (reference, query):
        CeLEry.get_zscore(adata)
    positions = pd.DataFrame(data["positions"], columns=["x_cord", "y_cord"])
    n_epochs = min(EPOCHS, -(-EPOCHS * CELLS // len(positions)))
    # The package prints a line for every epoch and a bar for every batch.
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as silent:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            CeLEry.Fit_cord(
                reference, location_data=positions, num_epochs_max=n_epochs, path=folder, num_workers=0, seednum=seed
            )
            share = CeLEry.Predict_cord(query, path=folder)
    # Fit_cord maps each axis, extended by one unit on both sides, to the interval from 0 to 1.
    low, high = data["positions"].min(axis=0) - 1, data["positions"].max(axis=0) + 1
    return {"celery": low + share * (high - low)}


def _normalized(x: np.ndarray, *, is_counts: bool) -> ad.AnnData:
    adata = ad.AnnData(x.copy())
    if is_counts:
        sc.pp.normalize_total(adata)
        sc.pp.log1p(adata)
    return adata
