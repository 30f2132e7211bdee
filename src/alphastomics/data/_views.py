"""Other views of cells, which share their arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from numpy.typing import NDArray

    from alphastomics.data._sources import CellSource, SliceCells


def shallow_copy(adata: ad.AnnData, *, obs: pd.DataFrame | None = None) -> ad.AnnData:
    """Cells with the arrays of others, or copies of those of a view, without ``uns``; with another table if one is given."""
    layers = {name: values for name, values in adata.layers.items() if name is not None}  # X in anndata 0.13
    table = adata.obs if obs is None else obs
    cells = ad.AnnData(X=adata.X, obs=table, var=adata.var, obsm=dict(adata.obsm), varm=dict(adata.varm), layers=layers)
    return cells.copy() if adata.is_view else cells  # an assignment to an array of a view would change the view


class SourceView:
    """A source with other ``slices``; cells keep their row numbers."""

    def __init__(self, source: CellSource, slices: Sequence[SliceCells]) -> None:
        self._source, self.slices = source, tuple(slices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class SomeSlices(SourceView):
    """The slices ``index`` of a source."""

    def __init__(self, source: CellSource, index: Sequence[int]) -> None:
        super().__init__(source, [source.slices[i] for i in index])
        self._index = tuple(index)
        self.measured: NDArray[np.bool_] = np.any([source.measured_in(i) for i in index], axis=0)

    def measured_in(self, slice_index: int) -> NDArray[np.bool_]:
        """Which genes of the schema the cells of a slice have, (G,)."""
        return self._source.measured_in(self._index[slice_index])

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """Numbers, within a slice, of the cells of each piece."""
        return self._source.pieces(self._index[slice_index])

    def encode(self, values: NDArray[np.float32], factor: NDArray[np.float32], slice_index: int) -> NDArray[np.float32]:
        """Transform values of cells of a slice to network units, in place."""
        return self._source.encode(values, factor, self._index[slice_index])
