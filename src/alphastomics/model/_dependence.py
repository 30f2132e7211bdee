r"""What neighbouring cells have in common beyond what their places explain.

.. math::

    \varepsilon_{ig} = \sqrt{1 - a_g}\; \xi_{ig} + \sqrt{\frac{a_g}{k + 1}} \sum_{j \in N_i \cup \{i\}} \zeta_{jg},
    \qquad \xi, \zeta \sim \mathcal N(0, 1)

is the noise that a draw of expression starts from, N_i being the k cells nearest to i. The noise of one cell is standard
normal whatever the shares a are, so that every cell alone is drawn as without them: a Gaussian copula over the cells.
Given their places the network draws cells that know little of each other; in tissue, cells that touch share a niche, and
transcripts leak from one to the next.

The share of a gene is that with which samples at the places of the reference have Moran's I of the reference's own cells:

.. math:: a \leftarrow a + \frac{I^{true} - I(a)}{I(1) - I(0)}

starting from 0, see :func:`alphastomics.model._calibration.fit_dependence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

N_NEIGHBOURS = 10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dependence:
    """Shares of the noise that neighbours have in common.

    Parameters
    ----------
    share
        a of every gene, (G,), in [0, 1].
    """

    share: NDArray[np.float32]

    def fits(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shape is that of a tissue of so many genes and axes."""
        return self.share.shape == (n_genes,)

    def noise(self, near: Tensor, generator: torch.Generator) -> Tensor:
        """Draw noise (N, G) of cells whose nearest other cells are ``near`` (N, k)."""
        shape = len(near), len(self.share)
        own, shared = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        field = shared.clone()
        for rank in near.unbind(1):  # one at a time: (N, k, G) is too much for a large slice
            field += shared[rank]
        share = torch.from_numpy(self.share)
        return (1 - share).sqrt() * own + (share / (near.shape[1] + 1)).sqrt() * field
