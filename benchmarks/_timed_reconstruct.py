"""Positions by ``tl.reconstruct``, within a time if one is given.

Run as ``python benchmarks/_timed_reconstruct.py REFERENCE QUERY OUTPUT SEED [SECONDS]``.

It also runs with earlier versions of the package on the path, whose public interface is the same.
"""

from __future__ import annotations

import sys

import anndata as ad
import numpy as np


def main(reference: str, query: str, output: str, seed: str, seconds: str | None = None) -> None:
    """Write the positions of the cells of a file to another one."""
    import alphastomics as asx

    cells = ad.read_h5ad(query)
    max_time = None if seconds is None else float(seconds)
    asx.tl.reconstruct(
        cells, ad.read_h5ad(reference), random_state=int(seed), max_time=max_time, enable_progress_bar=False
    )
    np.save(output, cells.obsm["spatial_reconstructed"])


if __name__ == "__main__":
    main(*sys.argv[1:])
