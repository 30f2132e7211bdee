r"""Fit of the changes of genes with which draws of positions are samples of the posterior.

A draw d and the truth x of the same cells are two samples of one distribution. For every score S of two placements therefore

.. math:: \mathbb E\, S(d, d') = \mathbb E\, S(d, x).

The share q of the genes is the one for which the mean over scores of :math:`\log S(d, d') - \log S(d, x)` is 0 on cells that the
network has not seen. The scores are the share of preserved neighbors and the Spearman correlation of distances. The standard
deviation :math:`\tau` of the offsets is not fitted: slices of one specimen have no offsets from each other, but a query has. For
counts it was chosen by the coverage of the draws of another specimen (``docs/design-notes.md``); values that are not counts have
none.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from alphastomics.metrics import distance_spearman, knn_preservation
from alphastomics.sampling._cells import encode_cells, evenly_spaced_indices
from alphastomics.sampling._held_out_score import FEWEST_CELLS
from alphastomics.sampling._perturbation import Perturbation
from alphastomics.sampling._position import PositionSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.sampling._sampler import Sampler

    Array = NDArray[np.float64]

N_CELLS = 1024  # that are placed, of one slice
N_DRAWS = 3
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
OFFSET = 0.6  # of the genes, for counts, log-normalized and binary values
DEFAULT_SHARE = 0.5  # if there are too few cells or genes
FLOOR = 0.01  # of a score, below which it is chance


def fit_perturbation(sampler: Sampler, source: CellSource, held_out: Sequence[SliceCells]) -> Perturbation:
    """Fit the share of genes; ``held_out`` are cells of ``source`` that the network has not seen."""
    offset = OFFSET if source.schema.is_detected else 0.0
    parts = [cells for cells in held_out if len(cells.rows) >= FEWEST_CELLS and cells.position is not None]
    if not parts or source.measured.sum() < 2:
        return Perturbation(share=DEFAULT_SHARE, offset=offset)
    agreement = _Agreement(sampler, source, parts[len(parts) // 2])
    return Perturbation(share=_fit_share(agreement, offset), offset=offset)


def _fit_share(agreement: _Agreement, offset: float) -> float:
    """The share at which draws agree with each other as well as with the truth, by bisection of SHARES."""
    low, high = -1, len(SHARES)
    at_low = at_high = 0.0
    while high - low > 1:
        middle = (low + high) // 2
        value = agreement.log_ratio(Perturbation(share=SHARES[middle], offset=offset))
        if value < 0:
            low, at_low = middle, value
        else:
            high, at_high = middle, value
    if low < 0 or high == len(SHARES):
        return SHARES[max(low, 0)]
    weight = at_low / (at_low - at_high)
    return (1 - weight) * SHARES[low] + weight * SHARES[high]


class _Agreement:
    """Agreement of draws of the cells of a slice with each other and with the truth."""

    def __init__(self, sampler: Sampler, source: CellSource, cells: SliceCells) -> None:
        index = evenly_spaced_indices(len(cells.rows), N_CELLS)
        assert cells.position is not None  # checked by the caller
        self.sampler, self.source = sampler, source
        self.rows, self.true = cells.rows[index], cells.position[index] / source.schema.scale

    def log_ratio(self, perturbation: Perturbation) -> float:
        """Log S(d, d') - log S(d, x), mean over the scores S."""
        draws = [self._draw(perturbation, number) for number in range(N_DRAWS)]
        between = np.mean([scores(a, b) for a, b in combinations(draws, 2)], axis=0)
        with_truth = np.mean([scores(self.true, draw) for draw in draws], axis=0)
        return float(np.mean(np.log(np.maximum(between, FLOOR) / np.maximum(with_truth, FLOOR))))

    def _draw(self, perturbation: Perturbation, number: int) -> Array:
        rng = np.random.default_rng(number)
        change = perturbation.draw(self.source.measured, rng)
        cells = encode_cells(self.sampler.module, self.source, self.rows, max_context=N_CELLS, change=change)
        draw = PositionSampler(self.sampler, cells).place(rng, refine=self.sampler.refines, retrieve=True)
        return draw.cpu().double().numpy()


def scores(a: Array, b: Array) -> tuple[float, float]:
    """Share of the neighbors that two placements (N, D) have in common, and Spearman correlation of their distances."""
    return knn_preservation(a, b), distance_spearman(a, b)
