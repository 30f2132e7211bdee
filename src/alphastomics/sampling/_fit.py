"""Statistics that are fitted after training, most of them by sampling expression at the positions of the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.spatial import KDTree

from alphastomics.config import PLACING_MODES, SamplingConfig
from alphastomics.data import local_density
from alphastomics.diffusion.geometry import center, kabsch
from alphastomics.metrics import morans_i
from alphastomics.sampling._calibration import Dependence, Marginals
from alphastomics.sampling._canonical import FRAME_CELLS, canonical_mean, reference_positions
from alphastomics.sampling._cells import content_order, encode_cells, evenly_spaced_indices, read_expression
from alphastomics.sampling._confidence import fit_confidence_cells
from alphastomics.sampling._expression import ExpressionSampler
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

CELLS = 1024  # of a slice that are sampled
PATCHES, PATCH_CELLS = 8, 256  # that are sampled to compare neighbors
MAX_CELLS = 16_384  # of a slice that are read at once
MARGINAL_SLICES, DEPENDENCE_SLICES = 4, 2
MARGINAL_STEPS, DEPENDENCE_STEPS = 20, 10  # of the sampler
DRAWS, ROUNDS = 4, 2  # over which Moran's I of samples is averaged; of corrections
MIN_CELLS = 50  # cells of a slice below which Moran's I is mostly chance
MIN_EFFECT = 0.05  # of shared noise on Moran's I, for genes whose samples hardly follow their noise


def fit_statistics(sampler: Sampler, source: CellSource, *, deformation: float) -> FittedStatistics:
    """Fit the statistics that sampling in the mode of a trained network requires.

    Statistics that ``sampler`` already has are ignored. ``source`` is its reference, with positions; ``deformation`` is the
    strength of the deformation of contexts in training.
    """
    fitted = FittedStatistics(frame=fit_frame(sampler, source), deformation=deformation, nearest=fit_nearest(source))
    sampler = replace(sampler, fitted=fitted)
    fitted = replace(fitted, reference_cells=fit_reference_cells(sampler, source, source.slices))
    if sampler.mode in PLACING_MODES:
        fitted = replace(fitted, confidence_cells=fit_confidence_cells(source))
    if sampler.mode != "expr_to_pos":
        fitted = replace(fitted, marginals=fit_marginals(sampler, source))
        dependence = fit_dependence(replace(sampler, fitted=fitted), source)
        fitted = replace(fitted, dependence=dependence)
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


def reference_sampler(
    sampler: Sampler, source: CellSource, cells: SliceCells, index: NDArray[np.int64]
) -> ExpressionSampler:
    """The sampler of the expression of the cells ``index`` of a reference slice, in one context."""
    assert cells.position is not None  # a training source reads them
    encoded = encode_cells(sampler.module, source, cells.rows[index], max_context=len(index))
    position = reference_positions(sampler, cells, index, canonical_mean(sampler, encoded))
    return ExpressionSampler(
        sampler,
        torch.from_numpy(position).to(sampler.device),
        max_context=len(index),
        local_density=torch.from_numpy(local_density(cells.position, index)).to(sampler.device),
        sequence=encoded.sequence,
    )


def fit_marginals(sampler: Sampler, source: CellSource) -> Marginals:
    """Sample the expression of reference cells at their positions, and compute the quantiles of samples and cells.

    ``sampler`` has no statistics of expression yet; ``source`` is its reference, with positions.
    """
    generator = torch.Generator().manual_seed(0)
    sampled, true = [], []
    chosen = evenly_spaced_indices(len(source.slices), MARGINAL_SLICES)
    for cells in (source.slices[i] for i in chosen):
        index = evenly_spaced_indices(len(cells.rows), CELLS)
        expression = reference_sampler(sampler, source, cells, index)
        config = SamplingConfig(mode="pos_to_expr", n_steps=MARGINAL_STEPS)
        sampled.append(expression.sample(config, generator).cpu().numpy())
        true.append(source.expression(cells.rows[index]))
    return Marginals.fit(np.concatenate(sampled), np.concatenate(true))


def fit_dependence(sampler: Sampler, source: CellSource) -> Dependence:
    """Fit the shares of the noise so that Moran's I of samples at reference positions is that of the reference.

    ``sampler`` has its marginals; ``source`` is its reference, with positions.
    """
    marginals = sampler.fitted.marginals
    assert marginals is not None  # fitted before
    slices = [cells for cells in source.slices if len(cells.rows) >= MIN_CELLS]
    patches = (
        [(slices[i], _patches(slices[i])) for i in evenly_spaced_indices(len(slices), DEPENDENCE_SLICES)]
        if slices
        else []
    )
    zero = np.zeros(sampler.schema.n_genes, dtype=np.float32)
    if not patches:
        return Dependence(share=zero)
    samplers = [reference_sampler(sampler, source, cells, index) for cells, index in patches]
    positions = [cells.position[index] for cells, index in patches if cells.position is not None]

    def moran(share: NDArray[np.float32]) -> NDArray[np.float64]:
        generator, values = torch.Generator().manual_seed(0), []
        config = SamplingConfig(mode="pos_to_expr", n_steps=DEPENDENCE_STEPS)
        for expression, position in zip(samplers, positions, strict=True):
            expression.dependence = Dependence(share=share)
            for _ in range(DRAWS):
                x = marginals.apply(expression.sample(config, generator).cpu().numpy())
                values.append(np.nan_to_num(morans_i(x, position)))
        return np.mean(values, axis=0)

    # Of whole slices: patches are too small for patterns of the size of an organ.
    true = np.mean([_moran(source, cells) for cells, _ in patches], axis=0)
    low, high = moran(zero), moran(zero + 1)
    effect = np.maximum(high - low, MIN_EFFECT)
    share = np.clip((true - low) / effect, 0, 1)
    for _ in range(ROUNDS):
        share = np.clip(share + (true - moran(share.astype(np.float32))) / effect, 0, 1)
    return Dependence(share=share.astype(np.float32))


def _moran(source: CellSource, cells: SliceCells) -> NDArray[np.float64]:
    """Moran's I (G,) of a slice, or of the MAX_CELLS nearest to its center; 0 for a constant gene."""
    assert cells.position is not None  # a training source reads them
    distance = np.linalg.norm(cells.position - np.median(cells.position, axis=0), axis=1)
    index = np.sort(np.argsort(distance, kind="stable")[:MAX_CELLS])
    return np.nan_to_num(morans_i(source.expression(cells.rows[index]), cells.position[index]))


def _patches(cells: SliceCells) -> NDArray[np.int64]:
    """Indices of the cells in random patches of neighboring cells of a slice."""
    assert cells.position is not None  # a training source reads them
    n_cells = len(cells.position)
    if n_cells <= PATCHES * PATCH_CELLS:
        return np.arange(n_cells)
    centers = np.random.default_rng(0).choice(n_cells, PATCHES, replace=False)
    return np.unique(KDTree(cells.position).query(cells.position[centers], PATCH_CELLS)[1])


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
        placed = PositionSampler(sampler, encode_cells(sampler.module, source, rows, max_context=n_cells))
        parts.append(
            (
                reference_positions(sampler, cells, index, placed.mean),
                np.full(len(index), number, dtype=np.float32),
                placed.feature.cpu().numpy() if places else empty,
                placed.cell_feature.cpu().numpy() if places else empty,
                read_expression(source, rows),
            )
        )
    position, numbers, feature, cell_feature, expression = (np.concatenate(part) for part in zip(*parts, strict=True))
    return ReferenceCells(
        position=position, slice=numbers, feature=feature, cell_feature=cell_feature, expression=expression
    )
