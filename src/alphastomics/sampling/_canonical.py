r"""The canonical frame, in which the network places cells.

In a free frame (``frame="slice"``) a slice is centered, and rotated onto the conditional mean of its cells given their
expression,

.. math:: x \leftarrow \frac{x - \bar x}{s}\, R, \qquad R = \arg\min_{R^\top R = I} \lVert (x - \bar x)\, R - \hat x \rVert^2,

with :math:`s` the scale of the reference. A shared frame is the canonical frame itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.diffusion.geometry import center, kabsch
from alphastomics.sampling._cells import encode_cells, evenly_spaced_indices
from alphastomics.sampling._position import PositionSampler

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.sampling._cells import EncodedCells
    from alphastomics.sampling._sampler import Sampler

FRAME_CELLS = 2048  # enough to fix a rotation
OVERLAP = 1.0  # model units between the centers of two slices up to which they overlap: about the radius of a slice


def canonical_mean(sampler: Sampler, cells: EncodedCells) -> Tensor:
    """Conditional mean of cells given their expression alone, (1, N, D), canonical frame, model units, float64."""
    return PositionSampler(sampler, cells).mean.cpu().double()


def canonical_rotation(sampler: Sampler, cells: EncodedCells, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation R (D, D) of the positions ``x`` (N, D) of cells."""
    mean = canonical_mean(sampler, cells)
    return kabsch(center(torch.from_numpy(x)[None]), center(mean))[0].numpy()


def reference_positions(
    sampler: Sampler, cells: SliceCells, index: NDArray[np.int64], mean: Tensor
) -> NDArray[np.float32]:
    """Positions (n, D), in the canonical frame and model units, of the cells ``index`` of a reference slice.

    ``mean`` (1, n, D) is their conditional mean.
    """
    schema = sampler.schema
    assert cells.position is not None  # a training source reads them
    if sampler.shared_frame:
        return schema.encode_position(cells.position[index])
    x = (cells.position[index] - cells.position.mean(axis=0)) / schema.scale
    rotation = kabsch(center(torch.from_numpy(x)[None]), center(mean.cpu().double()))[0]
    return (x @ rotation.numpy()).astype(np.float32)


def canonical_positions(
    sampler: Sampler, source: CellSource, rows: NDArray[np.int64], position: NDArray[np.float64], *, max_context: int
) -> NDArray[np.float32]:
    """Positions (N, D) of the cells ``rows`` of one slice in the canonical frame, model units."""
    if sampler.shared_frame:
        return sampler.schema.encode_position(position)
    x = (position - position.mean(axis=0)) / sampler.schema.scale
    chosen = evenly_spaced_indices(len(rows), FRAME_CELLS)
    cells = encode_cells(sampler.module, source, rows[chosen], max_context=max_context)
    return (x @ canonical_rotation(sampler, cells, x[chosen])).astype(np.float32)


def candidate_positions(
    sampler: Sampler, position: NDArray[np.float64], complete: tuple[NDArray[np.int64], EncodedCells] | None
) -> list[NDArray[np.float32]]:
    """Positions in the canonical frame, by the frame of the first reference slice and by complete cells, if there are any.

    A slice that overlaps with the first reference slice is taken as registered to it, its center included: where tissue is
    missing at one side, the center of the rest is not that of a whole slice.

    Parameters
    ----------
    position
        Positions (N, D) of a slice in user units.
    complete
        Indices in the slice of cells of which all genes are observed, and these cells.
    """
    schema = sampler.schema
    if sampler.shared_frame:
        return [schema.encode_position(position)]
    frame = sampler.reference_frame
    rotation, centroid = np.asarray(frame.rotation).T, position.mean(axis=0)
    x = (position - centroid) / schema.scale
    shift = (centroid - np.asarray(frame.centroid)) / schema.scale
    frames = [(x + shift if np.linalg.norm(shift) < OVERLAP else x) @ rotation]
    if complete is not None:
        index, cells = complete
        frames.append(x @ canonical_rotation(sampler, cells, x[index]))
    return [each.astype(np.float32) for each in frames]
