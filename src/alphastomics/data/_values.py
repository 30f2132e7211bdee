r"""Kinds of expression values, which determine the transform under ``transform="auto"``.

==================  ===========================================================================  ==========
kind                finite values                                                                transform
==================  ===========================================================================  ==========
``counts``          non-negative integers of no other kind                                       ``log1p``
``binary``          0 and 1 only, some of them 1                                                 ``none``
``intensities``     non-negative, some above 50 and not integer, or integers without one in 1–9  ``none``
``log-normalized``  non-negative and at most 50, some not integer, more than 1 % zeros           ``none``
``fractional``      non-negative and at most 50, some not integer, fewer zeros                   ``none``
``signed``          some negative                                                                ``none``
==================  ===========================================================================  ==========

Logarithms of normalized counts are at most about 20, so that larger values are intensities or normalized values without a logarithm.
Counts of a tissue contain small numbers; integers without them are intensities, rounded or scaled. Molecules that are not detected leave
zeros in counts and in their logarithms.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ValueKind = Literal["counts", "binary", "intensities", "log-normalized", "fractional", "signed"]

DESCRIPTIONS: dict[str, str] = {
    "counts": "counts (non-negative integers)",
    "binary": "binary (0 and 1 only)",
    "intensities": "intensities, or normalized without logarithm (large values, not counts)",
    "log-normalized": "log-normalized (fractional, with zeros)",
    "fractional": "fractional (without zeros)",
    "signed": "signed (such as standardized values)",
}
DETECTED: tuple[ValueKind, ...] = ("binary", "log-normalized")
"""Kinds of untransformed values that are smaller, as counts are, if fewer molecules are detected."""
LARGEST_LOGARITHM = 50
ZEROS = 0.01  # share of log-normalized values
SMALL_COUNT = 9
LARGEST_COUNT = 2**24  # up to which float32 stores integers exactly
MIN_NONZERO = 1000  # values below which a query can be of another kind by chance

logger = logging.getLogger(__name__)


class ValueSummary(NamedTuple):
    """Properties of the values of a matrix, and (row, column) of the first invalid value.

    ``kind`` is that of the finite values, ``integer`` whether they are integers of at most 2^24, and ``n_nonzero`` their number without zeros.
    """

    kind: ValueKind
    integer: bool
    n_nonzero: int
    nonfinite: tuple[int, int] | None
    negative: tuple[int, int] | None

    @property
    def counts(self) -> bool:
        """Whether all values are finite counts."""
        return self.kind == "counts" and self.nonfinite is None


@dataclass(slots=True)
class Evidence:
    """Properties of finite values that arrive in parts, and the kind that follows from them.

    Parameters
    ----------
    n_values
        Number of all values, those that a sparse matrix does not store included; zeros are counted if it is given.
    n_nonzero
        Number of values that are not 0.
    integer, binary
        Whether all values are integers of at most 2^24, or 0 and 1.
    signed, small
        Whether a value is negative, or positive and at most 9.
    largest
        The largest value, at least 0.
    """

    n_values: int = 0
    n_nonzero: int = 0
    integer: bool = True
    binary: bool = True
    signed: bool = False
    small: bool = False
    largest: float = 0.0

    def add(self, values: NDArray[Any]) -> None:
        """Add finite values (n,)."""
        if not len(values):
            return
        self.n_nonzero += int(np.count_nonzero(values))
        self.signed = self.signed or bool(values.min() < 0)
        self.largest = max(self.largest, float(values.max()))
        self.binary = self.binary and bool(((values == 0) | (values == 1)).all())
        self.integer = self.integer and self.largest <= LARGEST_COUNT
        if values.dtype.kind == "f":
            self.integer = self.integer and bool((np.trunc(values) == values).all())
        self.small = self.small or bool(((values > 0) & (values <= SMALL_COUNT)).any())

    def merge(self, other: Evidence) -> None:
        """Add the values of another matrix."""
        self.n_values, self.n_nonzero = self.n_values + other.n_values, self.n_nonzero + other.n_nonzero
        self.integer, self.binary = self.integer and other.integer, self.binary and other.binary
        self.signed, self.small = self.signed or other.signed, self.small or other.small
        self.largest = max(self.largest, other.largest)

    @property
    def kind(self) -> ValueKind:
        """Kind of all values together; zeros alone are counts."""
        if self.signed:
            return "signed"
        if not self.integer:
            if self.largest > LARGEST_LOGARITHM:
                return "intensities"
            return "log-normalized" if self.n_values - self.n_nonzero > ZEROS * self.n_values else "fractional"
        if not self.n_nonzero:
            return "counts"
        if self.binary:
            return "binary"
        return "counts" if self.small else "intensities"


def log_kind(cells: str, summary: ValueSummary, transform: str) -> None:
    """Log the kind of the values of some cells and the transform that follows."""
    logger.info("Values of %s are %s; transform: %s.", cells, DESCRIPTIONS[summary.kind], transform)


def describe_difference(reference: ValueKind | None, query: ValueSummary) -> str | None:
    """Message for a query whose values are of another kind than those of the reference; None if they are of the same.

    A reference without a record of its kind has any kind, as do few values. Whether fractional values have zeros depends on the genes.
    """
    similar = {reference, query.kind} <= {"fractional", "log-normalized"}
    if reference is None or reference == query.kind or similar or query.n_nonzero < MIN_NONZERO:
        return None
    return (
        f"The values of these cells are {DESCRIPTIONS[query.kind]}, but those of the reference are {DESCRIPTIONS[reference]}; "
        f"{_remedy(reference, query.kind)}."
    )


def _remedy(reference: ValueKind, query: ValueKind) -> str:
    if query == "counts" and reference == "binary":
        return "replace these values by X > 0"
    if query == "counts":
        return "transform these cells as the reference, or fit the reference to its counts with layer=…"
    if reference == "counts":
        return (
            "give these cells their raw counts (or rounded, if they were corrected), in the layer of the reference, or fit the reference "
            "to values as these are"
        )
    return "transform both in the same way, such as by scanpy.pp.normalize_total and scanpy.pp.log1p"
