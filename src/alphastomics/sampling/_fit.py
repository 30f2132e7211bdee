"""Statistics of the reference that are read after training, with the trained network."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.config import PLACING_MODES
from alphastomics.diffusion.geometry import center, kabsch
from alphastomics.sampling._canonical import FRAME_CELLS, canonical_mean, reference_positions
from alphastomics.sampling._cells import content_order, encode_cells, evenly_spaced_indices, read_expression
from alphastomics.sampling._confidence import fit_confidence_cells
from alphastomics.sampling._fit_expression import read_targets
from alphastomics.sampling._frames import ReferenceFrame
from alphastomics.sampling._overlap import NearestDistances
from alphastomics.sampling._position import PositionSampler
from alphastomics.sampling._reference_cells import (
    MAX_CELLS as MAX_REFERENCE_CELLS,
    MAX_SLICES,
    MAX_VALUES,
    ReferenceCells,
)
from alphastomics.sampling._sampler import FittedStatistics, Sampler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from alphastomics.data import CellSource, SliceCells


def fit_statistics(sampler: Sampler, source: CellSource, *, deformation: float) -> FittedStatistics:
    """The statistics that sampling in the mode of a trained network requires, except for those of sampled expression.

    Statistics that ``sampler`` already has are ignored. ``source`` is its reference, with positions; ``deformation`` is the
    strength of the deformation of contexts in training.
    """
    fitted = FittedStatistics(frame=fit_frame(sampler, source), deformation=deformation, nearest=fit_nearest(source))
    sampler = replace(sampler, fitted=fitted)
    fitted = replace(fitted, reference_cells=fit_reference_cells(sampler, source, source.slices))
    if sampler.mode in PLACING_MODES:
        fitted = replace(fitted, confidence_cells=fit_confidence_cells(source))
    if sampler.mode != "expr_to_pos":
        marginals, dependence = read_targets(sampler, source)
        fitted = replace(fitted, marginal_target=marginals, dependence_target=dependence)
    return fitted


def fit_frame(sampler: Sampler, source: CellSource) -> ReferenceFrame | None:
    """Find the canonical frame in the first reference slice; None for a shared frame."""
    if sampler.shared_frame:
        return None
    cells = source.slices[0]
    assert cells.position is not None  # a training source reads them
    index = evenly_spaced_indices(len(cells.rows), FRAME_CELLS)
    position = dict(zip(cells.rows[index].tolist(), cells.position[index], strict=True))
    rows = content_order(source, cells.rows[index])
    mean = canonical_mean(sampler, encode_cells(sampler.module, source, rows, max_context=FRAME_CELLS))
    true = torch.from_numpy(np.stack([position[row] for row in rows.tolist()]))[None]
    rotation = kabsch(center(mean), center(true))[0]
    return ReferenceFrame(
        slice_name=cells.name,
        rotation=tuple(tuple(float(v) for v in row) for row in rotation),
        centroid=tuple(float(v) for v in cells.position.mean(0)),
    )


def fit_nearest(source: CellSource) -> NearestDistances:
    """Nearest-neighbor distances in slices of the reference."""
    chosen = [source.slices[i].position for i in evenly_spaced_indices(len(source.slices), MAX_SLICES)]
    return NearestDistances.fit([x / source.schema.scale for x in chosen if x is not None])


def fit_reference_cells(sampler: Sampler, source: CellSource, slices: Sequence[SliceCells]) -> ReferenceCells:
    """Choose and describe cells of ``slices`` of a source with positions, as far as the mode of ``sampler`` requires it."""
    places = sampler.mode in PLACING_MODES
    chosen = [slices[i] for i in evenly_spaced_indices(len(slices), MAX_SLICES)]
    n_cells = max(1, min(MAX_REFERENCE_CELLS, MAX_VALUES // source.schema.n_genes) // len(chosen))
    parts: list[tuple[NDArray[np.float32], ...]] = []
    for number, cells in enumerate(chosen):
        index = evenly_spaced_indices(len(cells.rows), n_cells)
        rows, empty = cells.rows[index], np.empty((len(index), 0), dtype=np.float32)
        encoded = encode_cells(sampler.module, source, rows, max_context=n_cells)
        placed, sequence = PositionSampler(sampler, encoded), encoded.sequence
        parts.append(
            (
                reference_positions(sampler, cells, index, placed.mean),
                np.full(len(index), number, dtype=np.float32),
                placed.feature.cpu().numpy() if places else empty,
                placed.cell_feature.cpu().numpy() if places else empty,
                read_expression(source, rows),
                np.zeros(len(index), dtype=np.float32) if sequence is None else sequence.cpu().numpy(),
            )
        )
    names = ("position", "slice", "feature", "cell_feature", "expression", "sequence")
    return ReferenceCells(
        **{name: np.concatenate(part) for name, part in zip(names, zip(*parts, strict=True), strict=True)}
    )
