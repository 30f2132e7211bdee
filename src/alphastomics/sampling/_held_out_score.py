r"""Score of the placement of cells that a network has not seen, by which the length of a training is chosen and its result judged.

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
from alphastomics.sampling._cells import encode_cells, evenly_spaced_indices
from alphastomics.sampling._position import PositionSampler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.sampling._sampler import Sampler

N_CELLS = 2048  # that are placed, of one slice
N_NEIGHBORS = 20
FEWEST_CELLS = 30  # below which there is no score
LEAST = 1e-4  # difference of a score from 0 and 1


def score_held_out(sampler: Sampler, source: CellSource, held_out: Sequence[SliceCells]) -> float | None:
    """Score of one slice of ``held_out``, cells of ``source`` that the network has not seen; None if no slice has enough of them."""
    placed = _place(sampler, source, held_out)
    if placed is None:
        return None
    if not np.isfinite(placed.position).all():  # weights of a training that diverged
        return -np.inf
    return log_odds(_scores(placed))


def describe_held_out(sampler: Sampler, source: CellSource, held_out: Sequence[SliceCells]) -> dict[str, float] | None:
    """The scores of that slice, the number of its cells, and chance; None without a score."""
    placed = _place(sampler, source, held_out)
    if placed is None or not np.isfinite(placed.position).all():
        return None
    n = len(placed.position)
    chance = {"knn_preservation_chance": N_NEIGHBORS / (n - 1), "contact_precision_chance": CONTACT_SHARE}
    return {"n_scored": float(n)} | _scores(placed) | chance


def log_odds(scores: Mapping[str, float]) -> float:
    """Sum of the log odds of some scores."""
    return float(logit(np.clip(list(scores.values()), LEAST, 1 - LEAST)).sum())


class _Placed(NamedTuple):
    true: NDArray[np.float64]
    position: NDArray[np.float64]


def _place(sampler: Sampler, source: CellSource, held_out: Sequence[SliceCells]) -> _Placed | None:
    """Place at most ``N_CELLS`` of the middle slice that has enough cells, both in model units; None if there is none."""
    parts = [cells for cells in held_out if len(cells.rows) >= FEWEST_CELLS and cells.position is not None]
    if not parts:
        return None
    cells = parts[len(parts) // 2]
    assert cells.position is not None  # as chosen
    index = evenly_spaced_indices(len(cells.rows), N_CELLS)
    encoded = encode_cells(sampler.module, source, cells.rows[index], max_context=N_CELLS)
    placed = PositionSampler(sampler, encoded).place(np.random.default_rng(0), refine=sampler.refines)
    return _Placed(cells.position[index] / source.schema.scale, placed.cpu().double().numpy())


def _scores(placed: _Placed) -> dict[str, float]:
    return {
        "knn_preservation": knn_preservation(*placed, n_neighbors=N_NEIGHBORS),
        "distance_spearman": distance_spearman(*placed),
        "contact_precision": contact_precision(*placed),
    }
