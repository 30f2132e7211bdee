r"""Local density around each cell, from the distances to its neighbors.

.. math::

    u_{ik} = \log \frac{d_i(n_k)}{\operatorname{median}_j d_j(n_k)}

with :math:`d_i(n)` the distance from cell i to its n-th nearest neighbor in the slice. The median removes the unit of length
and the density of the slice as a whole, which differ between specimens and between instruments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial import KDTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

RANKS = (1, 2, 3, 5, 8, 12, 20, 32, 64)
BOUND = 3.0  # of the logarithm, also for coincident cells, whose distance is 0


def local_density(
    position: NDArray[np.float64], cells: NDArray[np.integer] | None = None, *, among: NDArray[np.bool_] | None = None
) -> NDArray[np.float32]:
    """Local density of cells among the cells of a slice.

    Parameters
    ----------
    position
        Positions (N, D) of the slice, in any unit.
    cells
        Row numbers of n cells; all when None. The medians are over these.
    among
        Mask (N,) of the cells of the slice that count as neighbors; all when None.

    Returns
    -------
    Array (n, K), float32, between -3 and 3, for the neighbors of rank 1, 2, 3, 5, 8, 12, 20, 32 and 64. With fewer
    neighbors than a rank the farthest one is used; 0 without neighbors.
    """
    rows = np.arange(len(position)) if cells is None else np.asarray(cells)
    among = np.ones(len(position), dtype=bool) if among is None else among
    n_neighbors = min(RANKS[-1], int(among.sum()) - 1)
    if n_neighbors < 1 or not len(rows):
        return np.zeros((len(rows), len(RANKS)), dtype=np.float32)
    tree = KDTree(position[among], balanced_tree=False, compact_nodes=False)  # made faster, for few queries
    near = tree.query(position[rows], n_neighbors + 1)[0]
    rank = np.minimum(RANKS, n_neighbors) - np.where(among[rows], 0, 1)[:, None]  # a cell is not its own neighbor
    distance = np.take_along_axis(near, rank, axis=1)
    smallest = np.finfo(np.float64).tiny
    ratio = np.log(np.maximum(distance, smallest)) - np.log(np.maximum(np.median(distance, axis=0), smallest))
    return np.clip(ratio, -BOUND, BOUND).astype(np.float32)
