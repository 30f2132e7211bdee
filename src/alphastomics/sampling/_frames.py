r"""Transformation from the canonical frame of the model to the first reference slice.

.. math:: x_{user} = s\,(x_{model} R + \mu / s), \qquad R = \text{Kabsch}(\hat x, x_{ref})

with the model's conditional mean :math:`\hat x` of the first reference slice and its true positions, whose centroid is
:math:`\mu`. A registered tissue (``frame="shared"``) needs no such rotation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.data import TissueSchema


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

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ReferenceFrame:
        """Rebuild from plain values.

        Raises
        ------
        ValueError
            If the values are not a frame in two or three dimensions.
        """
        rotation = tuple(tuple(float(value) for value in row) for row in values["rotation"])
        centroid = tuple(float(value) for value in values["centroid"])
        n_dims = len(centroid)
        if n_dims not in (2, 3) or [len(row) for row in rotation] != [n_dims] * n_dims:
            raise ValueError("the rotation and the centroid of the frame differ in dimension")
        if not np.isfinite([*rotation, centroid]).all():
            raise ValueError("the frame has values that are not finite")
        return cls(slice_name=str(values["slice_name"]), rotation=rotation, centroid=centroid)
