r"""From the canonical frame, in which the model thinks, to the frame of a reference slice, which a user recognizes.

.. math:: x_{user} = s\,(x_{model} R + \mu / s), \qquad R = \text{Kabsch}(\hat x, x_{ref})

with the model's conditional mean :math:`\hat x` of the first reference slice and its true positions, whose centroid is
:math:`\mu`. A registered tissue (``frame="shared"``) needs none of this.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from alphastomics.diffusion.geometry import center, kabsch
from alphastomics.sampling._position import PositionSampler, cell_order, content_order, embed_cells

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.data import CellSource, SliceCells, TissueSchema
    from alphastomics.model._model import AlphaSTomics

CELLS = 2048  # enough to fix a rotation


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceFrame:
    """Where the canonical frame lies in the first reference slice.

    Parameters
    ----------
    slice_name
        That slice.
    rotation
        R, (D, D), acting on row vectors.
    centroid
        Mean position of the slice, user units, (D,).
    """

    slice_name: str
    rotation: tuple[tuple[float, ...], ...]
    centroid: tuple[float, ...]

    def to_user(self, x: NDArray[np.float32], schema: TissueSchema) -> NDArray[np.float64]:
        """Positions (N, D) of the canonical frame in user units."""
        return (x.astype(np.float64) @ np.asarray(self.rotation)) * schema.scale + np.asarray(self.centroid)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ReferenceFrame:
        """Rebuild from :meth:`to_dict`.

        Raises
        ------
        ValueError
            If it is no frame of two or three dimensions.
        """
        rotation = tuple(tuple(float(value) for value in row) for row in values["rotation"])
        centroid = tuple(float(value) for value in values["centroid"])
        n_dims = len(centroid)
        if n_dims not in (2, 3) or [len(row) for row in rotation] != [n_dims] * n_dims:
            raise ValueError("the rotation and the centroid of its frame do not fit each other")
        if not np.isfinite([*rotation, centroid]).all():
            raise ValueError("its frame is NaN or infinite")
        return cls(slice_name=str(values["slice_name"]), rotation=rotation, centroid=centroid)


def canonical_mean(model: AlphaSTomics, source: CellSource, rows: NDArray[np.int64], *, max_context: int) -> Tensor:
    """Where the model expects cells by their expression alone: (1, N, D), canonical frame, model units, float64."""
    schema = model.schema
    positions = PositionSampler(
        model.module,
        model.diffusion,
        embed_cells(model.module, source, rows, model.module.device),
        shared_frame=False,
        spacing=schema.spacing / schema.scale,
        max_context=max_context,
        sequence=cell_order(model.module, source, rows),
    )
    return positions.mean.cpu().double()


def rotation_of_cells(
    model: AlphaSTomics, source: CellSource, rows: NDArray[np.int64], x: NDArray[np.float64], *, max_context: int
) -> NDArray[np.float64]:
    """Rotation (D, D) that brings positions ``x`` of ``rows`` to where the model expects these cells."""
    mean = canonical_mean(model, source, rows, max_context=max_context)
    return kabsch(center(torch.from_numpy(x)[None]), center(mean))[0].numpy()


def fit_frame(model: AlphaSTomics, source: CellSource) -> ReferenceFrame | None:
    """Find the canonical frame in the first reference slice; None for a shared frame."""
    if model.schema.frame == "shared":
        return None
    cells = source.slices[0]
    assert cells.position is not None  # a training source reads them
    few = evenly_spaced_indices(len(cells.rows), CELLS)
    position = dict(zip(cells.rows[few].tolist(), cells.position[few], strict=True))
    rows = content_order(source, cells.rows[few])
    mean = canonical_mean(model, source, rows, max_context=CELLS)
    true = torch.from_numpy(np.stack([position[row] for row in rows.tolist()]))[None]
    rotation = kabsch(center(mean), center(true))[0]
    return ReferenceFrame(
        slice_name=cells.name,
        rotation=tuple(tuple(float(v) for v in row) for row in rotation),
        centroid=tuple(float(v) for v in cells.position.mean(0)),
    )


def to_canonical(
    model: AlphaSTomics, source: CellSource, cells: SliceCells, few: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Positions (n, D), in the canonical frame and model units, of the cells ``few`` of a slice whose expression is known."""
    schema = model.schema
    assert cells.position is not None
    if schema.frame == "shared":
        return schema.encode_position(cells.position[few])
    x = (cells.position[few] - cells.position.mean(axis=0)) / schema.scale
    return (x @ rotation_of_cells(model, source, cells.rows[few], x, max_context=len(few))).astype(np.float32)


def evenly_spaced_indices(n: int, most: int) -> NDArray[np.int64]:
    """At most ``most`` of n numbers, evenly spread."""
    return np.linspace(0, n - 1, min(most, n)).astype(np.int64)
