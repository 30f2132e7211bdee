r"""Shift of the genes of a query, which another technique detects more or less efficiently than the reference.

.. math::

    d_g \leftarrow \frac1n \sum_i \Big( x_{ig} - \frac1k \sum_{j \in N_i(d)} y_{jg} \Big)

with expression x of n cells of the query and y of the reference, in network units, and the k cells :math:`N_i(d)` of the reference that
are nearest to :math:`x_i - d` in principal components of the reference: three iterations from d = 0. Every cell is compared with similar
ones, so that d depends little on the composition of the query, unlike the difference of the means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sklearn.decomposition import PCA

from alphastomics.data._encode import Encoder
from alphastomics.sampling._cells import ROWS, evenly_spaced_indices
from alphastomics.sampling._confidence import nearest_rows, read_values

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import CellSource, TissueSchema
    from alphastomics.sampling._confidence import ConfidenceCells

    Array = NDArray[np.float32]

N_ITERATIONS = 3
N_COMPONENTS = 20
N_NEAREST = 15  # k


def gene_shift(cells: ConfidenceCells, source: CellSource, rows: NDArray[np.int64]) -> Array:
    """Shift d (G,) of the query cells ``rows``, network units; 0 for genes that the query or ``cells`` lack."""
    shift = np.zeros(source.schema.n_genes, dtype=np.float32)
    genes = cells.genes.astype(np.int64)
    measured = source.measured[genes]
    if not measured.any():
        return shift
    genes = genes[measured]
    reference = _network_units(source.schema, cells.searched[:, measured], genes)
    query = _network_units(
        source.schema, read_values(source, rows[evenly_spaced_indices(len(rows), ROWS)], genes), genes
    )
    pca = PCA(min(N_COMPONENTS, *reference.shape), svd_solver="covariance_eigh").fit(reference)
    x = pca.transform(reference)
    for _ in range(N_ITERATIONS):
        nearest = nearest_rows(x, pca.transform(query - shift[genes]), N_NEAREST)[1]
        expected = np.mean([reference[rank].mean(0) for rank in nearest.T], axis=0)
        shift[genes] = query.mean(0) - expected
    return shift


def _network_units(schema: TissueSchema, values: Array, genes: NDArray[np.int64]) -> Array:
    """Expression (n, K) of ``genes``, given that in the units of :class:`ConfidenceCells`."""
    if schema.transform != "log1p":
        return values
    measured = np.zeros(schema.n_genes, dtype=bool)
    measured[genes] = True
    encoder, blocks = Encoder(schema, measured), []
    for block in np.array_split(values, -(-len(values) // ROWS)):
        every = np.zeros((len(block), schema.n_genes), dtype=np.float32)
        every[:, genes] = block
        blocks.append(encoder(every, encoder.factor(block.sum(1, dtype=np.float64)))[:, genes])
    return np.concatenate(blocks)
