r"""Principal components of the reference, whose scores are added to every embedding of expression.

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

CELLS = 5_000  # sampled cells; more change the components by less than the difference between animals


def principal_components(source: CellSource, n_components: int) -> NDArray[np.float32]:
    """The first components (G, K), where K is ``n_components`` or the number of cells or genes, if smaller."""
    expression = source.expression(evenly_spaced_indices(source.n_cells, CELLS))
    k = min(n_components, *expression.shape)
    return PCA(k, random_state=0).fit(expression).components_.T.astype(np.float32)
