"""Random changes of contexts: dropout of genes, noise in their scale, thinning of counts, rotations."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.config import Augmentation


class GeneChange(NamedTuple):
    """A random change of the expression of a context.

    ``measured`` (G,) are the genes that are left, ``dropout`` is the share of measured genes that is dropped,
    ``thinning`` the share of counts to remove. ``gain`` and ``shift`` (G,) are the same for all cells.
    """

    measured: NDArray[np.bool_]
    dropout: float
    thinning: float
    gain: NDArray[np.float32]
    shift: NDArray[np.float32]


def change_genes(
    present: NDArray[np.bool_], augmentation: Augmentation | None, rng: np.random.Generator | None
) -> GeneChange:
    """Draw a change of the genes of a context; gain and shift contain the factor 1 / sqrt(1 - dropout)."""
    if augmentation is None or rng is None:
        return GeneChange(present, 0.0, 0.0, present.astype(np.float32), np.zeros(len(present), dtype=np.float32))
    measured, genes = present.copy(), np.flatnonzero(present)
    n_dropped = int(rng.uniform(0.0, augmentation.gene_dropout) * len(genes))
    if n_dropped:
        measured[rng.choice(genes, n_dropped, replace=False)] = False
    dropout = n_dropped / len(genes) if n_dropped else 0.0
    thinning = rng.uniform(0.0, augmentation.thinning)
    kept = (measured / np.float32(np.sqrt(1 - dropout))).astype(np.float32)
    gain, shift = kept, np.zeros(len(present), dtype=np.float32)
    if strength := np.float32(augmentation.gene_noise):
        noise = rng.standard_normal((2, len(present)), dtype=np.float32) * strength
        gain, shift = (1 + noise[0]) * kept, noise[1] * kept
    return GeneChange(measured, dropout, thinning, gain, shift)


def random_rotation(n_dims: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw uniformly from the orthogonal group: QR of a Gaussian matrix, the signs of R moved to Q (Mezzadri 2007)."""
    q, r = np.linalg.qr(rng.standard_normal((n_dims, n_dims)))
    rotation: NDArray[np.float64] = q * np.sign(np.diagonal(r))
    return rotation
