"""Fit of the statistics of sampled expression, by sampling expression at positions of the reference.

:func:`read_targets` reads what the samples should have in common with the reference, after a training; :func:`fit_expression` fits
:mod:`~alphastomics.sampling._calibration` to it, before expression is sampled for the first time.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.spatial import KDTree

from alphastomics.config import SamplingConfig
from alphastomics.data import local_density
from alphastomics.metrics import morans_i
from alphastomics.sampling._calibration import Dependence, Marginals, quantiles
from alphastomics.sampling._canonical import canonical_mean, reference_positions
from alphastomics.sampling._cells import encode_cells, evenly_spaced_indices
from alphastomics.sampling._expression import ExpressionSampler
from alphastomics.sampling._expression_target import ExpressionTarget

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.sampling._sampler import FittedStatistics, Sampler

    Part = tuple[SliceCells, NDArray[np.int64]]  # a slice of the reference, and indices of cells in it

logger = logging.getLogger(__name__)

CELLS = 1024  # of a slice that are sampled
PATCHES, PATCH_CELLS = 8, 256  # that are sampled to compare neighbors
MAX_CELLS = 16_384  # of a slice that are read at once
MARGINAL_SLICES, DEPENDENCE_SLICES = 4, 2
MARGINAL_STEPS, DEPENDENCE_STEPS = 20, 10  # of the sampler
DRAWS, ROUNDS = 4, 2  # over which Moran's I of samples is averaged; of corrections
MIN_CELLS = 50  # cells of a slice below which Moran's I is mostly chance
MIN_EFFECT = 0.05  # of shared noise on Moran's I, for genes whose samples hardly follow their noise


def read_targets(sampler: Sampler, source: CellSource) -> tuple[ExpressionTarget, ExpressionTarget | None]:
    """Quantiles and Moran's I of the genes of ``source``, the reference, with positions.

    The second is None without a slice of at least ``MIN_CELLS`` cells.
    """
    chosen = [source.slices[i] for i in evenly_spaced_indices(len(source.slices), MARGINAL_SLICES)]
    parts = [(cells, evenly_spaced_indices(len(cells.rows), CELLS)) for cells in chosen]
    true = np.concatenate([source.expression(cells.rows[index]) for cells, index in parts])
    slices = [cells for cells in source.slices if len(cells.rows) >= MIN_CELLS]
    dependence = None
    if slices:
        patches = [(slices[i], _patches(slices[i])) for i in evenly_spaced_indices(len(slices), DEPENDENCE_SLICES)]
        # Of whole slices: patches are too small for patterns of the size of an organ.
        moran = np.mean([_moran(source, cells) for cells, _ in patches], axis=0)
        dependence = _target(moran[None], sampler, source, patches)
    marginals = _target(quantiles(true), sampler, source, parts)
    return marginals, dependence


def fit_expression(sampler: Sampler) -> FittedStatistics:
    """The statistics of ``sampler`` with those of sampled expression in place of the targets, to which they are fitted."""
    logger.info("Fitting the distribution of sampled expression, once after a training.")
    fitted = replace(sampler.fitted, marginals=fit_marginals(sampler))
    dependence = fit_dependence(replace(sampler, fitted=fitted))
    return replace(fitted, dependence=dependence, marginal_target=None, dependence_target=None)


def fit_marginals(sampler: Sampler) -> Marginals:
    """Quantiles of expression that is sampled at the positions of the target; ``sampler`` has no statistics of expression yet."""
    target = sampler.fitted.marginal_target
    assert target is not None  # read after every training that samples expression
    generator = torch.Generator().manual_seed(0)
    config = SamplingConfig(mode="pos_to_expr", n_steps=MARGINAL_STEPS)
    sampled = [expression.sample(config, generator).cpu().numpy() for expression, _ in _samplers(sampler, target)]
    return Marginals(sampled=quantiles(np.concatenate(sampled)), true=target.value)


def fit_dependence(sampler: Sampler) -> Dependence:
    """Shares of the noise so that Moran's I of samples at the positions of the target is that of the target.

    ``sampler`` has its marginals.
    """
    marginals, target = sampler.fitted.marginals, sampler.fitted.dependence_target
    assert marginals is not None  # fitted before
    zero = np.zeros(sampler.schema.n_genes, dtype=np.float32)
    if target is None:
        return Dependence(share=zero)
    samplers = list(_samplers(sampler, target))

    def moran(share: NDArray[np.float32]) -> NDArray[np.float64]:
        generator, values = torch.Generator().manual_seed(0), []
        config = SamplingConfig(mode="pos_to_expr", n_steps=DEPENDENCE_STEPS)
        for expression, position in samplers:
            expression.dependence = Dependence(share=share)
            for _ in range(DRAWS):
                x = marginals.apply(expression.sample(config, generator).cpu().numpy())
                values.append(np.nan_to_num(morans_i(x, position)))
        return np.mean(values, axis=0)

    true = target.value[0]
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


def _target(
    value: NDArray[np.floating], sampler: Sampler, source: CellSource, parts: Sequence[Part]
) -> ExpressionTarget:
    """A statistic with the positions of some cells of ``source``, the reference; the cells of a slice are one context."""
    arrays = [_describe(sampler, source, *part) for part in parts]
    position, density, sequence = (np.concatenate(each).astype(np.float32) for each in zip(*arrays, strict=True))
    context = np.repeat(np.arange(len(parts)), [len(index) for _, index in parts])
    return ExpressionTarget(
        value=value.astype(np.float32),
        position=position,
        local_density=density,
        sequence=sequence,
        context=context.astype(np.float32),
    )


def _describe(
    sampler: Sampler, source: CellSource, cells: SliceCells, index: NDArray[np.int64]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Position (n, D), local density (n, K) and order (n,) of cells of a slice."""
    assert cells.position is not None  # a training source reads them
    encoded = encode_cells(sampler.module, source, cells.rows[index], max_context=len(index))
    order = np.zeros(len(index), dtype=np.float32) if encoded.sequence is None else encoded.sequence.cpu().numpy()
    position = reference_positions(sampler, cells, index, canonical_mean(sampler, encoded))
    return position, local_density(cells.position, index), order


def _samplers(sampler: Sampler, target: ExpressionTarget) -> Iterator[tuple[ExpressionSampler, NDArray[np.float32]]]:
    """For each context of a target a sampler of the expression of its cells, and their positions."""
    for number in np.unique(target.context):
        cells = target.context == number
        position, density, sequence = (x[cells] for x in (target.position, target.local_density, target.sequence))
        expression = ExpressionSampler(
            sampler,
            torch.from_numpy(position).to(sampler.device),
            max_context=len(position),
            local_density=torch.from_numpy(density).to(sampler.device),
            sequence=torch.from_numpy(sequence).to(sampler.device) if sampler.module.config.reads_sequence else None,
        )
        yield expression, position
