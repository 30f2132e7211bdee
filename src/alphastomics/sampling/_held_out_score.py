r"""Score of the placement of cells that a network has not seen, by which the length of a training is chosen and its result scored.

.. math:: \sum_S \log \frac{S(y, x)}{1 - S(y, x)}

for the placement y without retrieved positions, the true positions x, and three scores S: the share of preserved neighbors, the Spearman
correlation of distances, and the precision of contacts. Log odds weigh a change of a high score as much as one of a low score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import logit

from alphastomics.metrics import contact_precision, distance_spearman, knn_preservation
from alphastomics.metrics._distances import CONTACT_SHARE
from alphastomics.metrics._neighbors import N_NEIGHBORS
from alphastomics.sampling._cells import encode_cells, evenly_spaced_indices
from alphastomics.sampling._position import PositionSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.sampling._sampler import Sampler

N_CELLS = 2048  # that are placed, of one slice
FEWEST_CELLS = 30  # below which there is no score, and nothing can be fitted
LEAST = 1e-4  # difference of a score from 0 and 1


class HeldOutScores(NamedTuple):
    """Scores of the placement of ``n_scored`` cells; NaN if a position is not finite, as after a training that diverged."""

    n_scored: int
    knn_preservation: float
    distance_spearman: float
    contact_precision: float

    @property
    def log_odds(self) -> float:
        """Sum of the log odds of the scores, by which placements are compared."""
        scores = np.array(self[1:])
        if np.isnan(scores).any():
            return -np.inf
        return float(logit(np.clip(scores, LEAST, 1 - LEAST)).sum())

    def to_dict(self) -> dict[str, float] | None:
        """The scores, with those of chance, which is 0 for the Spearman correlation; None if they are NaN."""
        if self.log_odds == -np.inf:
            return None
        chance = N_NEIGHBORS / (self.n_scored - 1)
        return self._asdict() | {"knn_preservation_chance": chance, "contact_precision_chance": CONTACT_SHARE}


def score_held_out(sampler: Sampler, source: CellSource, held_out: Sequence[SliceCells]) -> HeldOutScores | None:
    """Place at most ``N_CELLS`` cells of ``source`` that the network has not seen, of the middle slice of ``held_out`` with enough cells.

    None if no slice has enough of them.
    """
    parts = [cells for cells in held_out if len(cells.rows) >= FEWEST_CELLS and cells.position is not None]
    if not parts:
        return None
    cells = parts[len(parts) // 2]
    assert cells.position is not None  # as chosen
    index = evenly_spaced_indices(len(cells.rows), N_CELLS)
    encoded = encode_cells(sampler.module, source, cells.rows[index], max_context=N_CELLS)
    placed = PositionSampler(sampler, encoded).place(np.random.default_rng(0), refine=sampler.refines)
    return compare(cells.position[index] / source.schema.scale, placed.cpu().double().numpy())


def compare(true: NDArray[np.float64], placed: NDArray[np.float64]) -> HeldOutScores:
    """Scores of positions (N, D)."""
    if not np.isfinite(placed).all():
        return HeldOutScores(len(placed), np.nan, np.nan, np.nan)
    return HeldOutScores(
        n_scored=len(placed),
        knn_preservation=knn_preservation(true, placed),
        distance_spearman=distance_spearman(true, placed),
        contact_precision=contact_precision(true, placed),
    )
