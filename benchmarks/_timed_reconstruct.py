"""Positions by ``tl.reconstruct`` within a time.

Run as ``python benchmarks/_timed_reconstruct.py REFERENCE QUERY SEED SECONDS OUTPUT``.

It also runs with earlier versions of the package on the path, whose public interface is the same.
"""

from __future__ import annotations

import sys

import anndata as ad
import numpy as np


def main(reference: str, query: str, seed: str, seconds: str, output: str) -> None:
    """Write the positions of the cells of a file to another one."""
    import alphastomics as asx

    cells = ad.read_h5ad(query)
    asx.tl.reconstruct(
        cells, ad.read_h5ad(reference), random_state=int(seed), max_time=float(seconds), enable_progress_bar=False
    )
    np.save(output, cells.obsm["spatial_reconstructed"])


if __name__ == "__main__":
    main(*sys.argv[1:])
