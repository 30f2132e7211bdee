"""Tangram (Biancalani et al. 2021, doi:10.1038/s41592-021-01264-7): a soft assignment of cells to spots, from ``tangram-sc``."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

N_EPOCHS = 300


def available() -> bool:
    """Whether the package is installed."""
    return find_spec("tangram") is not None


def mapping(
    reference: NDArray[np.float64], query: NDArray[np.float64], *, seed: int, n_epochs: int = N_EPOCHS
) -> NDArray[np.float64]:
    """Probabilities (n_query, n_reference) that a cell is at a spot, from expression of the same genes in both."""
    import anndata as ad
    import tangram as tg

    spots, cells = (ad.AnnData(np.asarray(x, dtype=np.float32)) for x in (reference, query))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tg.pp_adatas(cells, spots, genes=None)
        result = tg.map_cells_to_space(
            cells, spots, mode="cells", density_prior="uniform", num_epochs=n_epochs, device="cpu", random_state=seed,
            verbose=False,
        )  # fmt: skip
    return np.asarray(result.X, dtype=np.float64)
