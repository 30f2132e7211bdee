r"""Sampled expression with the marginals of the reference.

.. math:: x_{ig} \leftarrow Q_g\big(F_g(x_{ig})\big)

with :math:`Q_g` the quantile function of gene g in the reference and :math:`F_g` the distribution of what the trained
model samples at the same cells' positions. The map is monotone: it moves no cell past another, and a query that differs
from the reference keeps its difference. It gives counts back what a short chain of Gaussian steps smooths away, the many
zeros above all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.data import crowding
from alphastomics.model._expression_chain import SliceExpression
from alphastomics.model._frames import evenly, to_canonical
from alphastomics.model._position_chain import SamplerConfig

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from alphastomics.data import AnnDataSource
    from alphastomics.model._model import AlphaSTomics

N_SLICES, CELLS = 4, 1024  # of the reference that are sampled
LEVELS = np.unique(np.concatenate([np.linspace(0, 1, 65), 1 - np.logspace(-3, -1.5, 12)]))
"""Where quantiles are taken: finer at the top, which holds the cells that express a gene."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Marginals:
    """Quantiles of every gene in network units.

    Parameters
    ----------
    sampled, true
        (K, G), ascending along K.
    """

    sampled: NDArray[np.float32]
    true: NDArray[np.float32]

    @classmethod
    def of(cls, sampled: ArrayLike, true: ArrayLike) -> Marginals:
        """Quantiles of samples (M, G) and of cells (N, G)."""
        quantiles = (np.quantile(np.asarray(x, dtype=np.float64), LEVELS, axis=0) for x in (sampled, true))
        return cls(**dict(zip(("sampled", "true"), (q.astype(np.float32) for q in quantiles), strict=True)))

    def apply(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map values (N, G) that the model sampled."""
        columns = [np.interp(x[:, g], self.sampled[:, g], self.true[:, g]) for g in range(x.shape[1])]
        return np.stack(columns, axis=1).astype(np.float32)


def fit_marginals(model: AlphaSTomics, source: AnnDataSource, *, n_steps: int = 20) -> Marginals:
    """Sample the expression of some cells of the reference at their positions, and compare.

    Parameters
    ----------
    model
        A trained model that samples expression.
    source
        Its reference, with positions.
    n_steps
        Steps of the chain.
    """
    generator = torch.Generator().manual_seed(0)
    sampled, true = [], []
    chosen = evenly(len(source.slices), N_SLICES)
    for cells in (source.slices[i] for i in chosen):
        assert cells.position is not None  # a training source reads them
        few = evenly(len(cells.rows), CELLS)
        device = model.module.device
        chain = SliceExpression(
            model.module,
            model.diffusion,
            torch.from_numpy(to_canonical(model, source, cells, few)).to(device),
            max_context=CELLS,
            crowding=torch.from_numpy(crowding(cells.position, few)).to(device),
        )
        sampled.append(chain.sample(SamplerConfig(n_steps=n_steps), generator).cpu().numpy())
        true.append(source.expression(cells.rows[few]))
    return Marginals.of(np.concatenate(sampled), np.concatenate(true))
