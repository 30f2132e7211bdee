"""What contexts need of a set of cells, whether it lies in memory or on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from alphastomics.data._schema import TissueSchema


class SliceCells(NamedTuple):
    """The cells of one slice.

    Attributes
    ----------
    name
        Name of the slice.
    rows
        Row numbers of its cells in the source, ascending.
    position
        Positions in user units, shape (n, D), float64, NaN where a cell has none; None when positions are not read.
    """

    name: str
    rows: NDArray[np.int64]
    position: NDArray[np.float64] | None


class CellSource(Protocol):
    """Cells in slices, with expression in network units on request."""

    @property
    def schema(self) -> TissueSchema:
        """The tissue the cells are read for."""

    @property
    def slices(self) -> tuple[SliceCells, ...]:
        """The slices, sorted by name."""

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Which genes of the schema any of the cells have, shape (G,)."""

    def measured_in(self, slice_index: int) -> NDArray[np.bool_]:
        """Which genes of the schema the cells of a slice have, shape (G,)."""

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """Numbers, within a slice, of cells that are read together; neighbours where there are several pieces."""

    @property
    def n_cells(self) -> int:
        """Number of cells."""

    @property
    def buffer_size(self) -> int | None:
        """Number of cells whose expression is held at once; None where all of it is in memory."""

    @property
    def has_counts(self) -> bool:
        """Whether the values are counts that can be thinned."""

    def expression(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> NDArray[np.float32]:
        """Expression of some cells in network units, shape (k, G)."""

    def values(
        self, rows: NDArray[np.int64], *, thinning: float | None = None, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Expression of some cells in user units, (k, G), 0 where a gene is not measured; and by what to multiply it, (k,)."""

    def sequence(self, rows: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """Index (k,) of some cells in their order, ``schema.sequence_key``; None where the cells have none."""

    def library_size(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Sum of the measured values of some cells, shape (k,)."""
