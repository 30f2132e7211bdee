r"""Transform of the expression of cells to network units.

.. math:: z_g = \operatorname{clip}(a_g\, y_g + b_g, \pm 10), \qquad
    y_g = \log(1 + f\, x_g) \;\text{or}\; x_g, \qquad
    f = T / \ell,\quad a_g = 1 / \text{scale}_g,\quad b_g = -\text{mean}_g / \text{scale}_g

in the symbols of :class:`~alphastomics.data.TissueSchema`, in float32 and in place: with numpy for rows of a source, with PyTorch
for batches on the training device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import scipy.sparse as sp

from alphastomics.data._schema import CLIP

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.data._schema import TissueSchema

BLOCK_VALUES = 2**15  # of a block, 128 KiB in float32, which fits into the cache of the processor
NOT_THINNED = 'Only integer counts under transform="log1p" and binary values can be thinned; set thinning=0.'
SMALL_COUNT = 24


class Encoder:
    """Transforms expression from user units to network units.

    ``measured`` (G,) are the genes that the cells have, all when None; the others become 0.
    """

    def __init__(self, schema: TissueSchema, measured: NDArray[np.bool_] | None = None) -> None:
        measured = np.ones(schema.n_genes, dtype=bool) if measured is None else measured
        self._log1p = schema.transform == "log1p"
        self._target = schema.target_library_size(measured) if self._log1p and measured.any() else 0.0
        self._rows = max(1, BLOCK_VALUES // schema.n_genes)
        slope = 1.0 / np.asarray(schema.gene_scale)
        offset = (-np.asarray(schema.gene_mean) * slope).astype(np.float32)
        # Repeated for all rows of a block: numpy runs one long loop instead of one for each row.
        self._slope, self._offset = (
            np.tile(values * measured, (self._rows, 1)) for values in (slope.astype(np.float32), offset)
        )
        self._tensors: tuple[Tensor, Tensor] | None = None

    def factor(self, library_size: NDArray[np.float64]) -> NDArray[np.float32]:
        """T / library size of cells (k,), 1 for cells without counts; not used under ``transform="none"``."""
        factor = np.divide(self._target, library_size, out=np.ones(len(library_size)), where=library_size > 0)
        return factor.astype(np.float32)

    def __call__(self, values: NDArray[np.float32], factor: NDArray[np.float32]) -> NDArray[np.float32]:
        """Encode rows (k, G), 0 for genes that are not measured, with factors (k,), in place."""
        for start in range(0, len(values), self._rows):
            block = values[start : start + self._rows]
            if self._log1p:
                block *= factor[start : start + self._rows, None]
                block += np.float32(1)
                np.log(block, out=block)
            block *= self._slope[: len(block)]
            block += self._offset[: len(block)]
            if block.max(initial=0) > CLIP or block.min(initial=0) < -CLIP:
                np.clip(block, -CLIP, CLIP, out=block)
        return values

    def encode_tensor(self, values: Tensor, factor: Tensor) -> Tensor:
        """Encode a batch (B, N, G) with factors (B, N), in place, on its device."""
        import torch

        if self._tensors is None or self._tensors[0].device != values.device:
            slope, offset = (torch.from_numpy(each[0]).to(values.device) for each in (self._slope, self._offset))
            self._tensors = slope, offset
        slope, offset = self._tensors
        if self._log1p:
            values.mul_(factor[..., None]).log1p_()
        return values.mul_(slope).add_(offset).clamp_(-CLIP, CLIP)


def dense_rows(
    values: sp.csr_matrix,
    n_genes: int,
    *,
    columns: NDArray[np.int64] | None = None,
    thinning: float | None = None,
    rng: np.random.Generator | None = None,
) -> NDArray[np.float32]:
    """Sparse cells (k, m) as a dense array (k, G), after a share ``thinning`` of the counts is removed at random.

    ``values`` is canonical and in user units; ``columns`` are the genes of its m columns, all genes in order when None.
    """
    data = values.data.astype(np.float32)
    if thinning:
        data = thin(data, thinning, rng)
    genes = values.indices if columns is None else columns[values.indices]
    return sp.csr_matrix((data, genes, values.indptr), shape=(values.shape[0], n_genes), copy=False).toarray()


def thin_rows(values: NDArray[np.float32], thinning: float, rng: np.random.Generator | None) -> None:
    """Remove a share of the counts of dense cells, in place."""
    flat = values.reshape(-1)
    filled = np.flatnonzero(flat)
    flat[filled] = thin(flat[filled], thinning, rng)


def thin(counts: NDArray[np.float32], thinning: float, rng: np.random.Generator | None) -> NDArray[np.float32]:
    """Keep each count with probability ``1 - thinning``, rounded to a multiple of 1 / 65,536; counts are (n,).

    Each unit of a small count draws 16 bits, which takes less time than ``rng.binomial``.
    """
    if rng is None or not 0 < thinning < 1:
        raise ValueError(f"thinning={thinning} must lie in [0, 1) and requires rng.")
    bound = round((1 - thinning) * 2**16)
    small = counts <= SMALL_COUNT
    kept = np.empty_like(counts)
    few = counts[small].astype(np.int64)
    stays = rng.integers(0, 2**16, few.sum(), dtype=np.uint16) < bound
    total = np.concatenate([[0], np.cumsum(stays, dtype=np.int64)])
    kept[small] = np.diff(total[np.cumsum(few)], prepend=0)
    kept[~small] = rng.binomial(counts[~small].astype(np.int64), bound / 2**16)
    return kept
