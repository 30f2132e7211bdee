r"""What a regression per cell achieves: the mean position of the most similar reference cells.

.. math:: \hat x_i = \frac{1}{k} \sum_{j \in \mathcal N_k(i)} x_j

with the neighbours found in principal components of :math:`\log(1 + \cdot)` of counts at the median library size. Every
reference slice has its own frame, and a mean over two frames means nothing. The slices are therefore first moved into
the frame of the first one: each is rigidly aligned to the positions that the same regression on the first slice gives
its cells. No label and no position of the query is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sklearn.decomposition import PCA
from sklearn.neighbors import KNeighborsRegressor

from alphastomics.metrics import rigid_align

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


def knn_positions(
    query: AnnData,
    reference: AnnData,
    *,
    position_key: str = "spatial",
    slice_key: str = "slice_id",
    n_neighbors: int = 25,
    n_components: int = 30,
) -> Array:
    """Place the cells of a query by regression.

    Parameters
    ----------
    query
        Counts of the cells to place.
    reference
        Counts and positions of cells with the same genes.
    position_key
        Key of ``obsm`` with the positions of the reference.
    slice_key
        Column of ``obs`` with the slices of the reference.
    n_neighbors
        k, at most the cells of a slice.
    n_components
        Number of principal components, those of the reference.

    Returns
    -------
    Positions, (n_cells, n_dims), in the units of the reference and the frame of its first slice.
    """
    counts = [np.asarray(part.X.toarray(), dtype=np.float64) for part in (reference, query)]
    median = np.median(counts[0].sum(axis=1))
    expression = [np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1) * median) for x in counts]
    pca = PCA(min(n_components, *expression[0].shape), svd_solver="covariance_eigh").fit(expression[0])
    known, asked = (pca.transform(x) for x in expression)
    positions = np.array(reference.obsm[position_key], dtype=np.float64)
    names = reference.obs[slice_key].to_numpy(dtype=str)
    first, *others = (np.flatnonzero(names == name) for name in np.unique(names))
    anchor = KNeighborsRegressor(min(n_neighbors, len(first))).fit(known[first], positions[first])
    for rows in others:
        positions[rows] = rigid_align(positions[rows], anchor.predict(known[rows]))[0]
    return KNeighborsRegressor(min(n_neighbors, len(positions))).fit(known, positions).predict(asked)
