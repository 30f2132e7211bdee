r"""Principal components of the reference, from which every embedding of expression starts.

.. math:: V = \arg\max_{V^\top V = I} \operatorname{tr} V^\top C V

with C (G, G) the covariance of expression in network units, in which all genes vary alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from sklearn.decomposition import PCA

from alphastomics.sampling._cells import evenly_spaced_indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import CellSource

CELLS = 5_000  # sampled cells: more change the first components by less than another animal does


def principal_components(source: CellSource, n_components: int) -> NDArray[np.float32]:
    """The first components (G, K), K at most ``n_components`` and what cells and genes allow."""
    expression = source.expression(evenly_spaced_indices(source.n_cells, CELLS))
    k = min(n_components, *expression.shape)
    return PCA(k, random_state=0).fit(expression).components_.T.astype(np.float32)
