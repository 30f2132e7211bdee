r"""Transformation from the canonical frame of the model to the first reference slice, and the outlines of reference slices.

.. math:: x_{user} = s\,(x_{model} R + \mu / s), \qquad R = \text{Kabsch}(\hat x, x_{ref})

with the model's conditional mean :math:`\hat x` of the first reference slice and its true positions, whose centroid is
:math:`\mu`. A registered tissue (``frame="shared"``) needs no such rotation.

An outline is the density of the cells of a reference slice, to which a sample is transported:

.. math:: x \leftarrow x + \theta\,\big(Q_\theta(F_\theta(\theta^\top x)) - \theta^\top x\big), \qquad \theta = \theta_1, \dots, \theta_M, \theta_1, \dots

with :math:`Q_\theta` the quantile function of the reference slice along the direction :math:`\theta` and
:math:`F_\theta` the distribution of the sample: sliced optimal transport (Pitié et al. 2005, ICCV). Positions that are sampled
about uncertain means have tails where tissue has an edge. The map is smooth: cells that are neighbors stay neighbors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from alphastomics.nn.embeddings import directions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data import TissueSchema

N_DIRECTIONS = 8  # in two dimensions, twice as many in three
N_SWEEPS = 8
LEVELS = np.linspace(0, 1, 129)


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outlines:
    """Quantiles of the positions of reference slices along fixed directions.

    Parameters
    ----------
    quantiles
        (S, M, L) for S slices, M directions and L levels, in the canonical frame and model units.
    """

    quantiles: NDArray[np.float32]

    @classmethod
    def fit(cls, slices: Sequence[NDArray[np.float32]]) -> Outlines:
        """Outlines of slices of positions (n, D)."""
        n_dims = slices[0].shape[1]
        axes = directions(N_DIRECTIONS * (n_dims - 1), n_dims).numpy()
        quantiles = [np.quantile(x.astype(np.float64) @ axes.T, LEVELS, axis=0).T for x in slices]
        return cls(quantiles=np.stack(quantiles).astype(np.float32))

    def has_shape(self, n_genes: int, n_dims: int) -> bool:
        """Whether the shape matches the number of dimensions."""
        return 0 < len(self.quantiles) and self.quantiles.shape == (
            len(self.quantiles),
            N_DIRECTIONS * (n_dims - 1),
            len(LEVELS),
        )

    def apply(self, x: NDArray[np.float32], number: int) -> NDArray[np.float32]:
        """Move positions (N, D) into the outline of the slice ``number``."""
        y, targets = x.astype(np.float64), self.quantiles[number].astype(np.float64)
        axes = directions(len(targets), x.shape[1]).numpy()
        for _ in range(N_SWEEPS):
            for axis, target in zip(axes, targets, strict=True):
                along = y @ axis
                level = (np.argsort(np.argsort(along, kind="stable")) + 0.5) / len(y)
                y += (np.interp(level, LEVELS, target) - along)[:, None] * axis
        return y.astype(np.float32)
