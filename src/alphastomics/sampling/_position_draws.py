r"""Placement and draws of the positions of a query, and its uncertainty.

The uncertainty of cell i is the root mean square distance of its position from the returned one, estimated by the median over K
aligned draws,

.. math:: u_i = \sqrt{\frac{D}{\chi^2_D(1/2)}}\; \operatorname*{median}_k \lVert x_i^{(k)} - y_i \rVert,

with the median of the chi-square distribution with D degrees of freedom, so that u is consistent for normal draws, as the scaled median
absolute deviation is for numbers (Rousseeuw & Croux 1993). A few draws that retrieve a distant position do not determine it. If y
is one of the draws, their medoid, the others are used.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.stats import chi2

from alphastomics import _keys
from alphastomics.config import SamplingConfig
from alphastomics.data import AnnDataSource
from alphastomics.data._plane import restore_column
from alphastomics.diffusion.geometry import align
from alphastomics.sampling._cells import content_hash, encode_cells, read_expression, unchanged
from alphastomics.sampling._composition import (
    composed_contexts,
    composition_weights,
    relative_frequency,
)
from alphastomics.sampling._confidence import check_min_confidence, check_values, measure_confidence
from alphastomics.sampling._draws import align_draws, progress_bar, stack_draws
from alphastomics.sampling._gene_shift import gene_shift
from alphastomics.sampling._placed import (
    Placed,
    is_empty,
    report_composition,
    report_confidence,
    report_undetermined,
)
from alphastomics.sampling._position import PositionSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import CellSource, SliceCells
    from alphastomics.sampling._cells import EncodedCells, GeneScaling
    from alphastomics.sampling._sampler import Sampler

logger = logging.getLogger(__name__)

PLACEMENT, DRAW, TIES = 1, 2, 3  # keys of generators


def sample_positions(sampler: Sampler, query: AnnData, config: SamplingConfig, *, separate: bool = False) -> Placed:
    """Sample the positions of the cells of a query; see :meth:`AlphaSTomics.sample`.

    With ``separate``, overlaps are also removed from the mean of several samples, as they are from one.
    """
    source = AnnDataSource(query, sampler.schema, positions=config.inpaint)
    source.log_kind()
    check_min_confidence(config.min_confidence, sampler.fitted.confidence_cells)
    if sampler.fitted.confidence_cells is not None:
        check_values(sampler.fitted.confidence_cells, source)
    n_cells, n_samples = source.n_cells, config.n_samples
    n_returned = n_samples if config.reduce is None else 1
    known = np.zeros(n_cells, dtype=bool) if config.inpaint else None
    positions, tied = np.empty((n_returned, n_cells, sampler.schema.n_dims)), np.zeros(n_cells, dtype=bool)
    empty = np.full((3, n_cells), np.nan)
    placed = Placed(positions, empty[0], empty[1], empty[2], tied, known)
    logger.info("Placing %d cells in %d slices on %s.", n_cells, len(source.slices), sampler.device)
    with progress_bar(len(source.slices) * n_samples, "Placing cells", unit="draw") as bar:
        for cells in source.slices:
            _SliceDraws(sampler, source, cells, config, lambda: bar.update()).write(placed, separate=separate)
    report_confidence(placed, config)
    report_composition(placed)
    report_undetermined(placed, source, query, config)
    return placed._replace(positions=restore_column(placed.positions, query, source.slices, sampler.schema))


def predict_positions(sampler: Sampler, source: CellSource, *, inpaint: bool) -> tuple[SliceCells, ...]:
    """The slices of a source with the conditional mean of the positions of their cells, user units.

    With ``inpaint``, it is also conditioned on the known positions of the source, which do not change. The order of the cells
    depends on their expression alone.
    """
    config = SamplingConfig(inpaint=inpaint, refine=False)
    return tuple(_SliceDraws(sampler, source, cells, config, lambda: None).predicted() for cells in source.slices)


class _SliceDraws:
    """Placement and draws of one slice."""

    def __init__(
        self,
        sampler: Sampler,
        source: CellSource,
        cells: SliceCells,
        config: SamplingConfig,
        on_draw: Callable[[], None],
    ) -> None:
        self.sampler, self.source, self.config, self.on_draw = sampler, source, config, on_draw
        self.cells = cells
        rows = np.random.default_rng([config.random_state, TIES]).permutation(cells.rows)
        profile = content_hash(source, rows)
        order = np.argsort(profile, kind="stable")  # random among cells of equal expression
        self.rows, self.profile = rows[order], profile[order]
        self.known: NDArray[np.float64] | None = None  # user units, NaN where not known
        if cells.position is not None and np.isfinite(cells.position).all(1).any():
            self.known = cells.position[np.searchsorted(cells.rows, self.rows)]
        self.free = self.known is None and not sampler.shared_frame
        self.refine = sampler.refines if config.refine is None else config.refine

    @cached_property
    def frequency(self) -> NDArray[np.float64]:
        """Frequency (n,) of cells like these, relative to that in the reference."""
        compared = self.sampler.fitted.confidence_cells
        if compared is None:
            return np.ones(len(self.rows))
        return relative_frequency(compared, self.source, self.rows)

    @cached_property
    def confidence(self) -> NDArray[np.float64]:
        """Confidence (n,); NaN where there is none."""
        compared = self.sampler.fitted.confidence_cells
        if compared is None:
            return np.full(len(self.rows), np.nan)
        return np.where(is_empty(self.source, self.rows), 0.0, measure_confidence(compared, self.source, self.rows))

    @property
    def tied(self) -> NDArray[np.bool_]:
        """Cells (n,) without a known position that equal another one in all inputs of the network."""
        tied, config, profile = np.zeros(len(self.rows), dtype=bool), self.sampler.module.config, self.profile
        if config.reads_sequence:
            return tied
        if config.n_cell_types:
            profile = profile + self.source.cell_type(self.rows).astype(np.uint64)
        unknown = ~tied if self.known is None else ~np.isfinite(self.known).all(1)
        _, group, size = np.unique(profile[unknown], return_inverse=True, return_counts=True)
        tied[unknown] = size[group] > 1
        return tied

    @cached_property
    def weight(self) -> torch.Tensor:
        """Weights (n,) of the cells in the refinement."""
        return torch.from_numpy(composition_weights(self.frequency, self.confidence))

    def write(self, placed: Placed, *, separate: bool) -> None:
        """Write the rows of this slice to ``placed``; ``separate`` as in :func:`sample_positions`."""
        rows, n_samples, reduce = self.rows, self.config.n_samples, self.config.reduce
        if n_samples == 1:
            positions = self._place()[None]
            self.on_draw()
        else:
            positions, medoid = align_draws(np.stack([self._draw(k) for k in range(n_samples)]), rigid=self.free)
            if reduce == "medoid":
                placed.uncertainty[rows] = uncertainty(np.delete(positions, medoid, axis=0), positions[medoid])
                positions = positions[medoid][None]
            elif reduce == "mean":
                mean = self._place(separate=False)
                if self.free:
                    positions = align(
                        *(torch.from_numpy(x) for x in (positions, np.broadcast_to(mean, positions.shape).copy()))
                    ).numpy()
                placed.uncertainty[rows] = uncertainty(positions, mean)
                positions = (self._place() if separate else mean)[None]
        placed.positions[:, rows], placed.frequency[rows] = positions, self.frequency
        placed.confidence[rows], placed.tied[rows] = self.confidence, self.tied
        left_out = rows[self.confidence < self.config.min_confidence]
        placed.positions[:, left_out], placed.uncertainty[left_out] = np.nan, np.nan
        if self.known is not None:
            finite = np.isfinite(self.known).all(1)
            placed.positions[:, rows[finite]] = self.known[finite]
            placed.uncertainty[rows[finite]] = 0.0
            placed.confidence[rows[finite]] = 1.0
            if placed.known is not None:
                placed.known[rows[finite]] = True

    def predicted(self) -> SliceCells:
        """The slice at its placement, without removal of overlaps."""
        return self.cells._replace(rows=self.rows, position=self._place(separate=False))

    def _place(self, number: int | None = None, *, separate: bool = True) -> NDArray[np.float64]:
        """Placement (n, D) in user units, or the draw of a ``number``; generators do not depend on the other slices."""
        sampler, seed = self.sampler, self.config.random_state
        rng, change, independent = np.random.default_rng([seed, PLACEMENT]), None, None
        if self.config.independent and number is None:
            compared, measured = sampler.fitted.confidence_cells, self.source.measured
            shift = np.zeros(len(measured), dtype=np.float32)
            if compared is not None:
                shift = gene_shift(compared, self.source, self.rows)
            gain, _ = unchanged(self.source)
            change = gain, -gain * shift
            independent = torch.from_numpy(read_expression(self.source, self.rows) - shift), torch.from_numpy(measured)
        if number is not None:
            rng = np.random.default_rng([seed, DRAW, number])
            change = sampler.perturbation.draw(self.source.measured, rng)
        known, origin = None, np.zeros(sampler.schema.n_dims)
        if self.known is not None:
            if not sampler.shared_frame:  # 32 bits are too few for positions far from the origin
                origin = np.nanmean(self.known, axis=0)
            known = torch.from_numpy(sampler.schema.encode_position(self.known - origin)).to(sampler.device)
        cells = self._unchanged if change is None else PositionSampler(sampler, self._encoded(sampler, change))
        x = cells.place(
            rng,
            refine=self.refine,
            retrieval_weight=sampler.retrieval_weight,
            weight=self.weight if self.refine or number is not None else None,
            separate=separate,
            retrieve=number is not None,
            independent=independent,
            known=known,
        )
        return sampler.to_user(x.cpu().numpy(), in_user_frame=known is not None) + origin

    @cached_property
    def _unchanged(self) -> PositionSampler:
        """Conditional mean of the cells without a change of their genes, by both networks."""
        sampler, second = self.sampler, None
        if sampler.second is not None:
            other = replace(sampler, module=sampler.second)
            second = PositionSampler(other, self._encoded(other, None))
        return PositionSampler(sampler, self._encoded(sampler, None), second)

    def _encoded(self, sampler: Sampler, change: GeneScaling | None) -> EncodedCells:
        """The cells of this slice as input of the network of a sampler."""
        max_context = self.config.max_context
        cells = encode_cells(sampler.module, self.source, self.rows, max_context=max_context, change=change)
        return cells._replace(contexts=composed_contexts(self.frequency, max_context, sampler.device))

    def _draw(self, number: int) -> NDArray[np.float64]:
        draw = self._place(number)
        self.on_draw()
        return draw


def uncertainty(draws: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Uncertainty (n_cells,) of a position (n_cells, D) from draws (K, n_cells, D)."""
    n_dims = position.shape[1]
    return np.median(np.linalg.norm(draws - position, axis=2), axis=0) * np.sqrt(n_dims / chi2.median(n_dims))


def add_positions(query: AnnData, placed: Placed, key: str, *, reduced: bool, slice_key: str | None) -> AnnData:
    """A copy of a query with its positions in ``obsm[key]``, several draws one after the other."""
    tables = []
    for number in range(len(placed.positions)):
        # A copy: changes of the result in place, such as scanpy's transforms, must not reach the query.
        table = query.copy()
        write_positions(table, placed, key, number=number, reduced=reduced)
        tables.append(table)
    result = stack_draws(tables, slice_key)
    result.uns = tables[0].uns
    return result


def write_positions(adata: AnnData, placed: Placed, key: str, *, number: int = 0, reduced: bool) -> None:
    """Write the draw of a ``number``, with the uncertainty if draws were reduced, in place of results of an earlier call."""
    for suffix in _keys.POSITION_SUFFIXES:
        if key + suffix in adata.obs:
            del adata.obs[key + suffix]
    adata.obsm[key] = placed.positions[number]
    if reduced:
        adata.obs[key + _keys.UNCERTAINTY_SUFFIX] = placed.uncertainty
    adata.obs[key + _keys.CONFIDENCE_SUFFIX] = placed.confidence
    if placed.tied.any():
        adata.obs[key + _keys.TIED_SUFFIX] = placed.tied
    if placed.known is not None:
        adata.obs[key + _keys.PLACED_SUFFIX] = ~placed.known
