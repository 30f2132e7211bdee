"""Which expression is given while the rest of a context is sampled: whole cells, or some genes of cells.

What a user may hold: a section of which a few cells were measured, a panel that lacks some genes, single values that are
missing. Completing cells takes longer to learn than writing whole ones: three quarters of the contexts hold some of their genes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOTHING, CELLS, GENES = 0.15, 0.25, 0.65  # cumulative shares of the contexts; in the rest single entries are held
CELL_SHARE = 0.02, 0.5  # of the cells, evenly on a logarithmic scale
GENE_SHARE = 0.3, 0.95  # of the genes, or of the entries


def draw_held(n_cells: int, n_genes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw the held entries (N, G) of one context."""
    kind = rng.random()
    held = np.zeros((n_cells, n_genes), dtype=bool)
    if kind < NOTHING:
        return held
    if kind < CELLS:
        held[rng.random(n_cells) < np.exp(rng.uniform(*np.log(CELL_SHARE)))] = True
        return held
    share = rng.uniform(*GENE_SHARE)
    if kind < GENES:
        held[:, rng.permutation(n_genes)[: int(share * n_genes)]] = True
        return held
    return rng.random((n_cells, n_genes)) < share
