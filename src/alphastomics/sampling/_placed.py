"""A placement, and what is reported of it: cells that match nothing, another composition, cells that nothing distinguishes."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from alphastomics import _keys
from alphastomics.sampling._composition import MAX_RATIO, is_other_composition
from alphastomics.sampling._confidence import MIN_REPORTED, UNMATCHED, unmatched_share

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.config import SamplingConfig
    from alphastomics.data import CellSource

logger = logging.getLogger(__name__)

MAX_UNMATCHED = 0.5  # share of unmatched cells, above which a warning is issued


class Placed(NamedTuple):
    """Positions of the cells of a query.

    Attributes
    ----------
    positions
        All draws, or one row of reduced positions, (K, n_cells, D), user units.
    uncertainty
        Scaled median distance of the draws from the returned position, (n_cells,), user units; NaN for a single draw.
    confidence
        Confidence, (n_cells,); NaN where there is none.
    frequency
        Frequency of cells like each one, relative to that in the reference, (n_cells,).
    tied
        Cells that no input of the network distinguishes from another one of their slice, (n_cells,).
    known
        Cells whose position was known, (n_cells,); None if no positions were read.
    """

    positions: NDArray[np.float64]
    uncertainty: NDArray[np.float64]
    confidence: NDArray[np.float64]
    frequency: NDArray[np.float64]
    tied: NDArray[np.bool_]
    known: NDArray[np.bool_] | None


def report_confidence(placed: Placed, config: SamplingConfig) -> None:
    """Log the number of cells that are not placed, and warn if the reference lacks many cells of the query."""
    min_confidence = config.min_confidence
    unplaced = int((placed.confidence < min_confidence).sum())
    if min_confidence:
        logger.info(
            "%d of %d cells have a confidence below %g and are not placed.",
            unplaced,
            len(placed.confidence),
            min_confidence,
        )
    share = unmatched_share(placed.confidence)
    if share > MAX_UNMATCHED:
        warnings.warn(
            f"{share:.0%} of the cells have a confidence below {UNMATCHED:g} ({UNMATCHED:.0%} expected): cell types that the reference "
            "lacks, or another specimen or instrument. "
            + (
                f"{unplaced} cells below min_confidence={min_confidence:g} are not placed."
                if min_confidence
                else "All cells are placed; min_confidence=… leaves out the least similar ones, and "
                f'obs["{config.key_added}{_keys.CONFIDENCE_SUFFIX}"] shows which.'
            ),
            UserWarning,
            stacklevel=4,
        )


def report_composition(placed: Placed) -> None:
    """Log the share of cells of over-represented cell states, with a warning if they are many."""
    over = placed.frequency[placed.frequency > MAX_RATIO]
    if len(over) < MIN_REPORTED:
        return
    message = (
        f"{len(over) / len(placed.frequency):.0%} of the cells are of cell states that are more than {MAX_RATIO:g} times as frequent "
        f"as in the reference (median: {np.median(over):.2g} times). Each of them is placed together with a part of the others only, so that "
        "the composition is that of the reference."
    )
    if is_other_composition(placed.frequency, placed.confidence):
        warnings.warn(message, UserWarning, stacklevel=4)
    else:
        logger.info(message)


def is_empty(source: CellSource, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether no molecule was detected in a cell, (n,)."""
    return (source.library_size(rows) == 0) & source.schema.is_detected


def report_undetermined(placed: Placed, source: CellSource, query: AnnData, config: SamplingConfig) -> None:
    """Warn if there are cells in which no molecule was detected, or others that nothing distinguishes."""
    empty = is_empty(source, np.arange(source.n_cells))
    if empty.any():
        warnings.warn(
            f"{empty.sum()} of {source.n_cells} cells have no counts, the first {str(query.obs_names[empty.argmax()])!r}: nothing determines "
            "their positions, and their confidence is 0. Remove them, such as with scanpy.pp.filter_cells(adata, min_counts=1), or pass "
            "min_confidence=….",
            UserWarning,
            stacklevel=4,
        )
    tied = placed.tied & ~empty
    if tied.any() and not config.independent:
        warnings.warn(
            f"{tied.sum()} of {source.n_cells} cells have the same expression as another cell of their slice in the "
            f"{source.measured.sum()} genes that are used, the first {str(query.obs_names[tied.argmax()])!r}: which of them lies where is "
            f'drawn with random_state, and obs["{config.key_added}{_keys.TIED_SUFFIX}"] marks them. Pass more genes of the reference, '
            "or counts instead of 0 and 1, to distinguish them.",
            UserWarning,
            stacklevel=4,
        )
