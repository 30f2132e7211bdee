r"""Draws of the positions of a query, their medoid or mean, and its uncertainty.

The uncertainty of the mean of K aligned draws of cell i, and of their medoid :math:`\tilde x_i`, is

.. math::

    u_i^2 = \frac{1}{K - 1} \sum_k \lVert x_i^{(k)} - \bar x_i \rVert^2, \qquad
    \tilde u_i^2 = u_i^2 + \lVert \tilde x_i - \bar x_i \rVert^2.

Each of the draws :math:`x^{(k)}` uses a random half of the genes (bagging, Breiman 1996). Draws from the same genes share the
deviations of the specimen, and their spread is too small.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import anndata as ad
import numpy as np
import torch

from alphastomics import _keys
from alphastomics.data import AnnDataSource
from alphastomics.diffusion.geometry import align
from alphastomics.sampling._cells import content_order, encode_cells
from alphastomics.sampling._draws import align_draws, draw_generator, mean_draw, progress_bar, spread, stack_draws
from alphastomics.sampling._position import PositionSampler

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.config import SamplingConfig
    from alphastomics.data import CellSource, SliceCells, TissueSchema
    from alphastomics.sampling._sampler import Sampler

logger = logging.getLogger(__name__)

VIEWS, LAYOUT, HALVES = 1, 2, 3  # keys of the generators of views, layout and halves of the genes


class Placed(NamedTuple):
    """Positions of the cells of a query.

    Attributes
    ----------
    draws
        (K, n_cells, D), user units.
    medoid
        Number of the medoid draw of each cell's slice, (n_cells,).
    uncertainty
        Root mean square distance of draws that each see half of the genes from the returned position, (n_cells,), user
        units; NaN without ``reduce`` and for a single draw.
    """

    draws: NDArray[np.float64]
    medoid: NDArray[np.int64]
    uncertainty: NDArray[np.float64]


def sample_positions(sampler: Sampler, query: AnnData, config: SamplingConfig) -> AnnData:
    """Sample the positions of the cells of a query; see :meth:`AlphaSTomics.sample`."""
    source = AnnDataSource(query, sampler.schema, positions=config.inpaint)
    n_cells, n_samples = source.n_cells, config.n_samples
    placed = Placed(
        np.empty((n_samples, n_cells, sampler.schema.n_dims)), np.zeros(n_cells, np.int64), np.full(n_cells, np.nan)
    )
    logger.info(
        "Placing %d cells in %d slices: %d draws of %d steps on %s.",
        n_cells, len(source.slices), n_samples, config.n_steps, sampler.device,
    )  # fmt: skip
    total = len(source.slices) * n_samples * config.n_steps * (2 if config.reduce == "medoid" else 1)
    with progress_bar(total, "Placing cells") as bar:
        for cells in source.slices:
            _SliceDraws(sampler, source, cells, config, lambda: bar.update()).write(placed)
    return _to_anndata(query, placed, sampler.schema, reduce=config.reduce)


class _SliceDraws:
    """Draws of the positions of one slice."""

    def __init__(
        self,
        sampler: Sampler,
        source: CellSource,
        cells: SliceCells,
        config: SamplingConfig,
        on_step: Callable[[], None],
    ) -> None:
        self.sampler, self.source, self.config, self.on_step = sampler, source, config, on_step
        self.rows = content_order(source, cells.rows)
        self.observed: NDArray[np.float64] | None = None  # user units, NaN where not observed
        if cells.position is not None and np.isfinite(cells.position).all(1).any():
            self.observed = cells.position[np.searchsorted(cells.rows, self.rows)]
        self.free = self.observed is None and not sampler.shared_frame

    def write(self, placed: Placed) -> None:
        """Write the rows of this slice to ``placed``."""
        rows, n_samples, reduce = self.rows, self.config.n_samples, self.config.reduce
        averaged = reduce == "mean" and n_samples > 1
        if not averaged:
            positions = self._positions(views=True)
            draws = np.stack([self._draw(positions, k) for k in range(n_samples)])
            if n_samples > 1:
                draws, placed.medoid[rows] = align_draws(draws, rigid=self.free)
        if reduce is not None and n_samples > 1:
            halves = np.stack([self._draw(self._positions(self._half_of_genes(k)), k) for k in range(n_samples)])
            halves, _ = align_draws(halves, rigid=self.free)
            placed.uncertainty[rows] = spread(halves)
            if averaged:
                draws = halves
            else:
                distance = self._distance(mean_draw(halves), draws[placed.medoid[rows[0]]])
                placed.uncertainty[rows] = np.hypot(placed.uncertainty[rows], distance)
        placed.draws[:, rows] = draws
        if self.observed is not None:
            finite = np.isfinite(self.observed).all(1)
            placed.draws[:, rows[finite]] = self.observed[finite]
            placed.uncertainty[rows[finite]] = 0.0

    def _positions(self, genes: NDArray[np.bool_] | None = None, *, views: bool = False) -> PositionSampler:
        """The sampler of the slice, with all genes or with some of them (G,), and with ``views`` averaged over views."""
        module, seed, max_context = self.sampler.module, self.config.random_state, self.config.max_context
        cells = encode_cells(module, self.source, self.rows, max_context=max_context, genes=genes)
        positions = PositionSampler(self.sampler, cells)
        if self.observed is not None:
            observed = self.sampler.schema.encode_position(self.observed)
            positions.observe(torch.from_numpy(observed).to(module.device))
        if views and self.config.n_views > 1:
            positions.average_views(self.source, self.rows, self.config, np.random.default_rng([seed, VIEWS]))
        if self.config.refine:
            positions.refine(draw_generator(seed, 0, LAYOUT))
        return positions

    def _draw(self, positions: PositionSampler, k: int) -> NDArray[np.float64]:
        # The generator does not depend on the other slices.
        x = positions.sample(self.config, draw_generator(self.config.random_state, k), self.on_step).cpu().numpy()
        return self.sampler.to_user(x, in_user_frame=self.observed is not None)

    def _half_of_genes(self, k: int) -> NDArray[np.bool_] | None:
        """The genes (G,) of draw ``k``: two draws together use each measured gene once; None for a single gene."""
        genes = np.flatnonzero(self.source.measured)
        if len(genes) < 2:
            return None
        shuffled = np.random.default_rng([self.config.random_state, HALVES, k // 2]).permutation(genes)
        half = np.zeros(self.source.schema.n_genes, dtype=bool)
        half[shuffled[k % 2 :: 2]] = True
        return half

    def _distance(self, mean: NDArray[np.float64], medoid: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distance (n,) of the cells of the medoid from the mean (n, D), aligned in a free frame."""
        if self.free:
            mean = align(*(torch.from_numpy(each)[None] for each in (mean, medoid)))[0].numpy()
        return np.linalg.norm(mean - medoid, axis=1)


def _to_anndata(query: AnnData, placed: Placed, schema: TissueSchema, *, reduce: str | None) -> AnnData:
    """The query with sampled positions instead of its own."""
    key, slice_key = schema.position_key, schema.slice_key
    # A copy: changes of the result in place, such as scanpy's transforms, must not reach the query.
    bare = ad.AnnData(X=None if query.X is None else query.X.copy(), obs=query.obs.copy(), var=query.var.copy())
    if reduce is None:
        tables = []
        for draw in placed.draws:
            table = bare.copy()
            table.obsm[key] = draw
            tables.append(table)
        return stack_draws(tables, slice_key)
    if reduce == "medoid":
        bare.obsm[key] = placed.draws[placed.medoid, np.arange(query.n_obs)]
    else:
        bare.obsm[key] = mean_draw(placed.draws)
    bare.obs[_keys.POSITION_UNCERTAINTY] = placed.uncertainty
    return stack_draws([bare], slice_key)
