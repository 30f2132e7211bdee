r"""Principal components of expression, whose scores are added to every embedding of expression.

.. math:: V = \arg\max_{V^\top V = I} \operatorname{tr} V^\top C V

C (G, G) is the covariance of expression in network units, in which genes have similar variances.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sklearn.decomposition import PCA

from alphastomics.sampling._cells import evenly_spaced_indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import CellSource

COMPONENT_CELLS = 5_000  # sampled cells; more change the components by less than the difference between animals


def principal_components(source: CellSource, n_components: int) -> NDArray[np.float32]:
    """The first ``n_components`` components (G, K); K is their number, or that of the cells or genes, if smaller."""
    rows = np.sort(np.concatenate([cells.rows for cells in source.slices]))
    expression = source.expression(rows[evenly_spaced_indices(len(rows), COMPONENT_CELLS)])
    k = min(n_components, *expression.shape)
    return PCA(k, random_state=0).fit(expression).components_.T.astype(np.float32)
