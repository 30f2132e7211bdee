"""Folders of simulated slices, written one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from anndata import AnnData


def make_slice(number: int, n_cells: int, n_genes: int, n_reads: int) -> AnnData:
    """Cells at random places whose molecules, ``n_reads`` or so, fall on genes of unequal abundance, as float32 counts."""
    import anndata as ad
    import numpy as np
    import pandas as pd
    from scipy import sparse

    rng = np.random.default_rng(number)
    abundance = np.random.default_rng(0).gamma(1.0, 1.0, n_genes)
    ends = np.concatenate(
        [[0], np.cumsum(np.maximum(1, n_reads * rng.lognormal(-0.08, 0.4, n_cells)).astype(np.int64))]
    )
    genes = np.searchsorted(np.cumsum(abundance / abundance.sum())[:-1], rng.random(ends[-1], dtype=np.float32))
    counts = sparse.csr_matrix((np.ones(len(genes), dtype=np.float32), genes, ends), shape=(n_cells, n_genes))
    counts.sum_duplicates()
    name = f"slice_{number:03d}"
    types = pd.Categorical.from_codes(rng.integers(0, 8, n_cells), [f"type_{i}" for i in range(8)])
    obs = pd.DataFrame({"slice_id": name, "cell_type": types}, index=[f"{name}_{i}" for i in range(n_cells)])
    var = pd.DataFrame(index=[f"gene_{i}" for i in range(n_genes)])
    return ad.AnnData(counts, obs=obs, var=var, obsm={"spatial": rng.uniform(0, 1000, (n_cells, 2))})


def write_slices(folder: Path, *, n_slices: int, n_cells: int, n_genes: int, n_reads: int) -> int:
    """Write ``n_cells`` cells, divided evenly, as a file for each slice; give the number of values that are not 0."""
    folder.mkdir(parents=True)
    n_values = 0
    for number in range(n_slices):
        adata = make_slice(number, n_cells // n_slices, n_genes, n_reads)
        adata.write_h5ad(folder / f"slice_{number:03d}.h5ad")
        n_values += adata.X.nnz
    return n_values
