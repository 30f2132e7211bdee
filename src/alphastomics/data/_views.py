"""Parts of a source of cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data._sources import CellSource


class SomeSlices:
    """The slices ``index`` of a source; cells keep their row numbers."""

    def __init__(self, source: CellSource, index: Sequence[int]) -> None:
        self._source, self._index = source, tuple(index)
        self.slices = tuple(source.slices[i] for i in index)
        self.measured: NDArray[np.bool_] = np.any([source.measured_in(i) for i in index], axis=0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def measured_in(self, slice_index: int) -> NDArray[np.bool_]:
        """Which genes of the schema the cells of a slice have, (G,)."""
        return self._source.measured_in(self._index[slice_index])

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """Numbers, within a slice, of the cells of each piece."""
        return self._source.pieces(self._index[slice_index])

    def encode(self, values: NDArray[np.float32], factor: NDArray[np.float32], slice_index: int) -> NDArray[np.float32]:
        """Transform values of cells of a slice to network units, in place."""
        return self._source.encode(values, factor, self._index[slice_index])
