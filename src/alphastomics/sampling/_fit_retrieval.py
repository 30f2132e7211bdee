r"""Fit of the weight of retrieved positions in a placement, on cells that a network has not seen.

.. math:: w^\star = \arg\max_w \sum_S \log \frac{S(y^{(w)}, x)}{1 - S(y^{(w)}, x)}

for placements y with the weight w, the true positions x, and three scores S: the share of preserved neighbors, the Spearman correlation of
distances, and the precision of contacts. Log odds weigh a change of a high score as much as one of a low score. In a tissue that is
symmetric, or whose specimens differ, the conditional mean alone is more exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.special import logit

from alphastomics.metrics import contact_precision, distance_spearman, knn_preservation
from alphastomics.sampling._cells import encode_cells, evenly_spaced_indices
from alphastomics.sampling._position import PositionSampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.sampling._sampler import Sampler

N_CELLS = 2048  # that are placed, of one slice
N_NEIGHBORS = 20
WEIGHTS = (0.0, 0.25, 0.5, 0.75)  # w
FEWEST_CELLS = 30  # below which nothing can be fitted
LEAST = 1e-4  # difference of a score from 0 and 1


def score_mean(sampler: Sampler, source: CellSource, held_out: Sequence[SliceCells]) -> float | None:
    """Score of the placement of held-out cells without retrieved positions; None if they are too few."""
    found = _place_held_out(sampler, source, held_out)
    if found is None:
        return None
    placed, true = found
    position = _position(placed, 0.0)
    return log_odds(true, position) if np.isfinite(position).all() else -np.inf  # weights of a training that diverged


def fit_retrieval_weight(sampler: Sampler, source: CellSource, held_out: Sequence[SliceCells]) -> float:
    """Choose the weight with the highest score; ``held_out`` are cells of ``source`` that the network has not seen."""
    found = _place_held_out(sampler, source, held_out)
    if found is None:
        return 0.0
    placed, true = found
    return max(WEIGHTS, key=lambda weight: log_odds(true, _position(placed, weight)))


def _place_held_out(
    sampler: Sampler, source: CellSource, held_out: Sequence[SliceCells]
) -> tuple[PositionSampler, NDArray[np.float64]] | None:
    """Held-out cells of one slice and their true positions (N, D); None if no slice has enough of them."""
    parts = [cells for cells in held_out if len(cells.rows) >= FEWEST_CELLS and cells.position is not None]
    if not parts:
        return None
    cells = parts[len(parts) // 2]
    assert cells.position is not None  # as chosen
    index = evenly_spaced_indices(len(cells.rows), N_CELLS)
    encoded = encode_cells(sampler.module, source, cells.rows[index], max_context=N_CELLS)
    return PositionSampler(sampler, encoded), cells.position[index] / source.schema.scale


def _position(placed: PositionSampler, weight: float) -> NDArray[np.float64]:
    """Placement (N, D) with a weight of retrieved positions."""
    rng = np.random.default_rng(0)
    return placed.place(rng, refine=placed.sampler.refines, retrieval_weight=weight).cpu().double().numpy()


def log_odds(true: NDArray[np.float64], position: NDArray[np.float64]) -> float:
    """Sum of the log odds of the scores of positions (N, D)."""
    scores = (
        knn_preservation(true, position, n_neighbors=N_NEIGHBORS),
        distance_spearman(true, position),
        contact_precision(true, position),
    )
    return float(logit(np.clip(scores, LEAST, 1 - LEAST)).sum())
