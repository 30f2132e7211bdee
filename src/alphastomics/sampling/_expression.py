r"""Sampling of expression, given positions.

The network sees all cells of a slice, up to ``max_context``; a larger slice is split into contexts that share anchors, and
the estimates of an anchor are averaged over contexts at every step, as in :mod:`alphastomics.sampling._position`.

Known values, of whole cells or of some genes, are clean inputs of the network at every step, marked as observed. They also
correct its conditional mean by :math:`\delta`, see :mod:`alphastomics.sampling._completion`. For Gaussian expression of unit
variance the estimate is then

.. math:: \hat x_0 = f(z_t, t) + \frac{\sigma_t^2}{\alpha_t^2 + \sigma_t^2}\, \delta,

with the whole correction at pure noise, and none without noise.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import torch
from scvi import settings
from tqdm.auto import tqdm

from alphastomics import _keys
from alphastomics.data import AnnDataSource, local_density, read_partial
from alphastomics.data._contexts import MIN_DENSITY
from alphastomics.diffusion import make_step, run_sampler
from alphastomics.diffusion.deformation import deform
from alphastomics.nn import nearest_neighbors
from alphastomics.sampling._calibration import N_NEIGHBORS, Neighborhood, pooled_sd
from alphastomics.sampling._cells import cell_order, content_order, split_contexts
from alphastomics.sampling._completion import krige
from alphastomics.sampling._draws import draw_generator, stack_draws, store_expression
from alphastomics.sampling._position import rotation_of_cells

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.config import SamplingConfig
    from alphastomics.data import PartialExpression, SliceCells, TissueSchema
    from alphastomics.sampling._sampler import Sampler

logger = logging.getLogger(__name__)

N_FOLDS = 5  # of the known cells, for the prediction of each from the others
LEFT_OUT = 0.2  # of the known values of cells that are known in part, to weigh the exemplars
FRAME_CELLS = 20  # known cells that fix a frame
OVERLAP = 1.0  # model units between the centers of two slices up to which they overlap: about the radius of a slice
VIEWS = 4  # key of the generators of views


class ExpressionSampler:
    """Samples the expression of the cells of one slice, given their positions.

    Parameters
    ----------
    sampler
        The trained network and what belongs to it.
    position
        Positions (N, D) in the canonical frame, model units.
    max_context
        Largest number of cells that attend to each other.
    known
        Known expression (N, G) in network units, NaN where unknown; None when nothing is known.
    local_density
        Local density of the cells (N, K); None when it is not known.
    sequence
        Index of the cells in their order (N,); None when the network reads none.

    Attributes
    ----------
    dependence
        Correlation of the noise of neighbors; None for independent noise.
    error
        Mean squared residual of each cell that is known as a whole (n,), in the order of the cells.
    """

    def __init__(
        self,
        sampler: Sampler,
        position: Tensor,
        *,
        max_context: int,
        known: Tensor | None = None,
        local_density: Tensor | None = None,
        sequence: Tensor | None = None,
    ) -> None:
        self.module, self.process = sampler.module, sampler.diffusion.expression
        self.dependence, self.exemplars = sampler.fitted.dependence, sampler.fitted.exemplars
        self.position, self.t_pos = position[None], sampler.given_time
        self.local_density = None if local_density is None else local_density[None]
        self.sequence = None if sequence is None else sequence[None]
        self.contexts = split_contexts(len(position), max_context, position.device)
        self.known = None if known is None else known.isfinite()[None]
        self.value = None if known is None else known.nan_to_num()[None]
        self.error = position.new_zeros(0)
        self.shift = self._shift()

    def estimate(self, z: Tensor, t: Tensor) -> Tensor:
        """Estimate of the clean expression (1, N, G)."""
        x_0 = self._estimate(z, t, self.known)
        if self.shift is None:
            return x_0
        alpha, sigma = self.process.coefficients(t, z)
        return x_0 + sigma**2 / (alpha**2 + sigma**2) * self.shift

    def _estimate(self, z: Tensor, t: Tensor, known: Tensor | None) -> Tensor:
        """Estimate of the network (1, N, G), averaged over contexts."""
        t_pos = torch.full_like(t, self.t_pos)
        total, count = torch.zeros_like(z), z.new_zeros(1, z.shape[1], 1)
        for cells, _ in self.contexts:
            observed = None if known is None else known[:, cells]
            local_density = None if self.local_density is None else self.local_density[:, cells]
            sequence = None if self.sequence is None else self.sequence[:, cells]
            z_cells, x = z[:, cells], self.position[:, cells]
            output = self.module(
                z_cells,
                x,
                t,
                t_pos,
                observed=observed,
                local_density=local_density,
                predict=("expression",),
                sequence=sequence,
            ).expression
            assert output is not None  # in ``predict``
            total[:, cells] += self.process.x0(output.float(), z_cells, t)
            count[:, cells] += 1
        return total / count

    def mean(self, local_density: Tensor, position: Tensor) -> Tensor:
        """Conditional mean (N, G) of the expression for another view of the slice.

        Parameters
        ----------
        local_density, position
            Local density (N, K) and positions (N, D) that replace those of the slice.
        """
        own = self.local_density, self.position
        self.local_density, self.position = local_density[None], position[None]
        try:
            return self._first_estimate()
        finally:
            self.local_density, self.position = own

    @cached_property
    def neighborhood(self) -> Neighborhood:
        """Neighbors of the cells, and the conditional mean of their expression in the slice as it is."""
        near = nearest_neighbors(self.position[0].cpu(), N_NEIGHBORS)
        return Neighborhood.of(near, self._first_estimate().cpu())

    @torch.no_grad()
    def _first_estimate(self) -> Tensor:
        """Estimate (N, G) from the known values alone."""
        one = self.position.new_ones(1)
        z = self.position.new_zeros(1, self.position.shape[1], self.module.config.n_genes)
        if self.known is None or self.value is None:
            return self.estimate(z, one)[0]
        x_0 = self.estimate(torch.where(self.known, self.value, z), one)
        return torch.where(self.known, self.value, x_0)[0]

    @torch.no_grad()
    def left_out(self) -> tuple[Tensor, Tensor]:
        """Indices (n,) of the cells with all genes known, and their mean (n, G) given the other folds only."""
        assert self.known is not None
        assert self.value is not None
        whole = self.known[0].all(-1).nonzero()[:, 0]
        mean = self.value.new_zeros(len(whole), self.value.shape[2])
        one = self.value.new_ones(1)
        for fold in range(min(N_FOLDS, len(whole))):
            known = self.known.clone()
            known[:, whole[fold::N_FOLDS]] = False
            x_0 = self._estimate(torch.where(known, self.value, 0.0), one, known)
            mean[fold::N_FOLDS] = x_0[0, whole[fold::N_FOLDS]]
        return whole, mean

    @torch.no_grad()
    def _shift(self) -> Tensor | None:
        """Correction of the conditional mean by known values, (1, N, G)."""
        if self.known is None or self.value is None:
            return None
        whole, mean = self.left_out()
        residual = self.value[0, whole] - mean
        self.error = residual.square().mean(dim=1)
        return (krige(self.position[0], whole, residual) + self._retrieved())[None]

    def _retrieved(self) -> Tensor:
        """Correction (N, G) by similar exemplars, for cells of which some genes are known."""
        assert self.known is not None
        assert self.value is not None
        known, value = self.known[0], self.value[0]
        shift = torch.zeros_like(value)
        part = known.any(-1) & ~known.all(-1)
        if self.exemplars is None or not bool(part.any()):
            return shift
        left = torch.rand(known.shape, generator=torch.Generator().manual_seed(0)).to(value.device) < LEFT_OUT
        left &= known & part[:, None]
        difference, mean = self._difference(known & ~left, part)
        seen, residual = left[part], value[part] - mean
        power = difference[seen].square().sum().clamp_min(1e-12)
        share = ((difference * residual)[seen].sum() / power).clamp(0, 1)
        shift[part] = share * self._difference(known, part)[0]
        return shift

    def _difference(self, known: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of the exemplars similar to the cells ``part`` (N,) minus that of the network, and the latter."""
        assert self.exemplars is not None
        assert self.value is not None
        value = torch.where(known, self.value[0], 0.0)
        mean = self._estimate(value[None], value.new_ones(1), known[None])[0, part]
        alike = self.exemplars.alike(value[part].cpu().numpy(), known[part].cpu().numpy())
        return torch.from_numpy(alike).to(mean) - mean, mean

    @torch.no_grad()
    def sample(
        self,
        config: SamplingConfig,
        generator: torch.Generator,
        *,
        mirrored: bool = False,
        on_step: Callable[[], None] | None = None,
    ) -> Tensor:
        """Draw expression (N, G) in network units; ``mirrored`` turns the sign of all noise.

        The draw and its mirror image are both samples. Their mean is nearer to the conditional mean than that of two
        independent draws, because what is linear in the noise cancels.
        """
        shape = (1, self.position.shape[1], self.module.config.n_genes)
        sign = -1.0 if mirrored else 1.0
        dependence = self.dependence

        def noise() -> Tensor:
            if dependence is None:
                drawn = torch.randn(shape, generator=generator)
            else:
                drawn = dependence.noise(self.neighborhood, generator)[None]
            return sign * drawn.to(self.position.device)

        def denoise(z: Tensor, t: Tensor) -> Tensor:
            if self.known is None or self.value is None:
                return self.estimate(z, t)
            z[:] = torch.where(self.known, self.value, z)
            return torch.where(self.known, self.value, self.estimate(z, t))

        step = make_step(config.sampler or "dpm++2m", self.process, eta=config.eta)
        return run_sampler(denoise, step, noise, n_steps=config.n_steps, on_step=on_step)[0]


def sample_expression(sampler: Sampler, query: AnnData, var: pd.DataFrame, config: SamplingConfig) -> AnnData:
    """Predict the expression of cells at their positions; see :meth:`AlphaSTomics.sample`.

    ``var`` describes the genes of the result.
    """
    schema, n_samples = sampler.schema, config.n_samples
    source = AnnDataSource(query, schema, positions=True, expression=False)
    for cells in source.slices:
        if cells.position is None or not np.isfinite(cells.position).all():
            raise ValueError(
                f'Slice {cells.name!r} has cells without a position in obsm["{schema.position_key}"]; '
                "sample their positions first (mode='expr_to_pos'), or remove them."
            )
    known = read_partial(query, schema) if config.inpaint else None
    logger.info(
        "Predicting expression at %d positions in %d slices: %d draws of %d steps on %s.",
        source.n_cells, len(source.slices), n_samples, config.n_steps, sampler.device,
    )  # fmt: skip
    total = len(source.slices) * n_samples * config.n_steps
    found = np.empty((n_samples, source.n_cells, schema.n_genes), dtype=np.float32)
    mean = np.empty(found.shape[1:], dtype=np.float32) if config.reduce == "mean" else None
    slices = []
    with tqdm(total=total, desc="Sampling expression", unit="step", disable=settings.verbosity > logging.INFO) as bar:
        for cells in source.slices:
            expression, rows = _slice_sampler(sampler, query, source, cells, config, known)
            if mean is not None:
                assert cells.position is not None  # checked above
                position = cells.position[np.searchsorted(cells.rows, rows)]
                mean[rows] = _mean_over_views(expression, position, config, deformation=sampler.deformation)
            for k in range(n_samples):
                # Two draws share their noise up to its sign, which `pooled_sd` relies on.
                generator = draw_generator(config.random_state, k // 2)
                x = expression.sample(config, generator, mirrored=bool(k % 2), on_step=lambda: bar.update())
                found[k, rows] = x.cpu().numpy()
            slices.append(rows)
    return _to_anndata(sampler, query, var, found, known, reduce=config.reduce, mean=mean, slices=slices)


def _slice_sampler(
    sampler: Sampler,
    query: AnnData,
    source: AnnDataSource,
    cells: SliceCells,
    config: SamplingConfig,
    known: PartialExpression | None,
) -> tuple[ExpressionSampler, NDArray[np.int64]]:
    """The sampler of one slice, and the rows of the query in the order of its cells."""
    assert cells.position is not None  # sample_expression raises an error
    # Sorted by position, so that the noise of a cell does not depend on the order of the rows.
    order = np.lexsort(cells.position.T)
    rows, device = cells.rows[order], sampler.device
    network = None if known is None else torch.from_numpy(known.network[rows]).to(device)
    density = torch.from_numpy(local_density(cells.position[order])).to(device)
    sequence = cell_order(sampler.module, source, rows)
    candidates = [
        ExpressionSampler(
            sampler,
            torch.from_numpy(position).to(device),
            max_context=config.max_context,
            known=network if network is not None and bool(network.isfinite().any()) else None,
            local_density=density,
            sequence=sequence,
        )
        for position in canonical_positions(sampler, query, rows, cells.position[order], known)
    ]
    return _better_frame(candidates), rows


def _better_frame(candidates: list[ExpressionSampler]) -> ExpressionSampler:
    """The first candidate, unless another predicts the known cells better by more than two standard errors."""
    first, best, gain = candidates[0], candidates[0], 0.0
    for other in candidates[1:]:
        difference = first.error - other.error
        mean, error = float(difference.mean()), float(difference.std()) / len(difference) ** 0.5
        if mean > max(gain, 2 * error):
            best, gain = other, mean
    return best


def canonical_positions(
    sampler: Sampler,
    query: AnnData,
    rows: NDArray[np.int64],
    position: NDArray[np.float64],
    known: PartialExpression | None,
) -> list[NDArray[np.float32]]:
    """Positions in the canonical frame, by the frame of the reference and by that of the known cells.

    A slice that overlaps with the first reference slice is taken as registered to it, its center included: where tissue is
    missing at one side, the center of the rest is not that of a whole slice.
    """
    schema = sampler.schema
    if sampler.shared_frame:
        return [schema.encode_position(position)]
    frame = sampler.reference_frame
    rotation, center = np.asarray(frame.rotation).T, position.mean(axis=0)
    x = (position - center) / schema.scale
    shift = (center - np.asarray(frame.centroid)) / schema.scale
    frames = [(x + shift if np.linalg.norm(shift) < OVERLAP else x) @ rotation]
    whole = np.zeros(len(rows), dtype=bool) if known is None else np.isfinite(known.values[rows]).all(axis=1)
    if whole.sum() >= FRAME_CELLS:
        frames.append(x @ _rotation_of_known(sampler, query[rows[whole]].copy(), x[whole]))
    return [each.astype(np.float32) for each in frames]


def _rotation_of_known(sampler: Sampler, cells: AnnData, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation of positions ``x`` that brings cells to their conditional mean given their expression."""
    source = AnnDataSource(cells, sampler.schema, positions=False)
    rows = content_order(source, np.arange(source.n_cells))
    return rotation_of_cells(sampler, source, rows, x[rows], max_context=source.n_cells)


def _mean_over_views(
    expression: ExpressionSampler, places: NDArray[np.float64], config: SamplingConfig, *, deformation: float
) -> NDArray[np.float32]:
    """Conditional mean (N, G) averaged over views, which deform the slice and thin the cells for the local density.

    The estimate of clean expression is a martingale along the reverse process: at every step its mean over draws is the
    conditional mean, and at the first step, before anything is drawn, it has no noise.
    """
    position, means = expression.position[0], []
    for k in range(config.n_samples):
        rng = np.random.default_rng([config.random_state, VIEWS, k])
        among = rng.random(len(places)) < rng.uniform(MIN_DENSITY, 1.0)
        density = torch.from_numpy(local_density(places, among=among)).to(position.device)
        means.append(expression.mean(density, deform(position, deformation, rng)).cpu().numpy())
    return np.stack(means).mean(axis=0, dtype=np.float64).astype(np.float32)


def _to_anndata(
    sampler: Sampler,
    query: AnnData,
    var: pd.DataFrame,
    draws: NDArray[np.float32],
    known: PartialExpression | None,
    *,
    reduce: str | None,
    mean: NDArray[np.float32] | None,
    slices: Sequence[NDArray[np.int64]],
) -> AnnData:
    """The cells of the query with sampled expression in the units of the reference.

    Parameters
    ----------
    draws
        (K, n_cells, G), network units.
    mean
        Conditional mean (n_cells, G) in network units, for ``reduce="mean"``.
    slices
        Rows of each slice, in an order that does not depend on the query's.
    """
    schema = sampler.schema
    size = np.full(query.n_obs, np.nan) if known is None else known.library_size
    size = np.where(np.isfinite(size) & (size > 0), size, schema.library_size or np.nan)

    def complete(values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values if known is None else np.where(np.isfinite(known.values), known.values, values).astype(np.float32)

    bare = ad.AnnData(obs=query.obs.copy(), var=var, shape=(query.n_obs, schema.n_genes))
    bare.obsm[schema.position_key] = np.array(query.obsm[schema.position_key], dtype=np.float64)
    if schema.transform == "log1p":
        bare.obs[_keys.LIBRARY_SIZE] = size
    values = [complete(sampler.decode_draw(x, size)) for x in draws]
    if mean is not None:
        average = complete(schema.decode_expression(mean, size))
        bare.layers[_keys.SD] = _standard_deviation(values, average, known, slices, schema)
        values = [average]
    elif reduce == "medoid":
        flat = draws.reshape(len(draws), -1).astype(np.float64)
        gram = flat @ flat.T
        distance = np.diag(gram)[:, None] + np.diag(gram) - 2 * gram
        values = [values[int(distance.sum(1).argmin())]]
    tables = []
    for x in values:
        table = bare.copy()
        store_expression(table, x, schema)
        tables.append(table)
    return stack_draws(tables, schema.slice_key)


def _standard_deviation(
    values: Sequence[NDArray[np.float32]],
    average: NDArray[np.float32],
    known: PartialExpression | None,
    slices: Sequence[NDArray[np.int64]],
    schema: TissueSchema,
) -> NDArray[np.float32]:
    """Standard deviation (n_cells, G) of draws, slice by slice, in the units of the reference; 0 for known values."""
    drawn = np.ones(average.shape, dtype=bool) if known is None else ~np.isfinite(known.values)
    sd = np.zeros_like(average)
    for rows in slices:
        draws = np.stack([x[rows] for x in values])
        sd[rows] = pooled_sd(draws, average[rows], drawn[rows], counts=schema.transform == "log1p")
    return sd
