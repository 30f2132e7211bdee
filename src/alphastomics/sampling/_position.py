r"""Sampling of positions, given expression.

All cells of a slice attend to each other. A slice larger than ``max_context`` is split into contexts that share the same
anchor cells,

.. math::

    \hat x_0^{(b)} = f(z_{A \cup B_b}), \qquad
    \hat x_0 \leftarrow \hat x_0^{(b)} R_b + \delta_b, \quad
    (R_b, \delta_b) = \arg\min \lVert \hat x^{(b)}_{0,A} R + \delta - \hat x^{(1)}_{0,A} \rVert^2,

and the estimates of the anchors are averaged over contexts, at every step of the reverse process: one joint sample, without
seams.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, NamedTuple

import anndata as ad
import numpy as np
import torch
import torch.nn.functional as F
from scvi import settings
from tqdm.auto import tqdm

from alphastomics import _keys
from alphastomics.data import AnnDataSource
from alphastomics.diffusion import SWITCH, make_step, run_sampler
from alphastomics.diffusion.geometry import align, center, kabsch
from alphastomics.sampling._cells import cell_order, content_order, embed_cells, split_contexts
from alphastomics.sampling._draws import (
    align_draws,
    check_mode,
    draw_generator,
    mean_of,
    spread,
    stack_draws,
)
from alphastomics.sampling._layout import refine_layout
from alphastomics.sampling._posterior import GaussianPosterior, estimate_posterior

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.config import SamplingConfig
    from alphastomics.data import CellSource, SliceCells, TissueSchema
    from alphastomics.nn import Prediction
    from alphastomics.sampling._sampler import Sampler

logger = logging.getLogger(__name__)

VIEW_DROPOUT = 0.2  # share of the genes that a view leaves out
VIEW_CONTEXT = 1024  # cells of a view that attend to each other
VIEWS, LAYOUT, HALVES = 1, 2, 3  # keys of the generators of views, layout and halves of the genes


class PositionSampler:
    """Samples the positions of one slice, given the expression of its cells.

    Parameters
    ----------
    sampler
        The trained network and what belongs to it.
    embedding
        Embedded expression (N, d).
    max_context
        Largest number of cells that attend to each other.
    observed
        Known positions (N, D) in user frame and model units, NaN where unknown; None when nothing is known.
    sequence
        Index of the cells in their order (N,), see :func:`cell_order`; None when the network reads none.

    Attributes
    ----------
    mean
        Conditional mean (1, N, D) in the canonical frame, with which sampling starts.
    """

    def __init__(
        self,
        sampler: Sampler,
        embedding: Tensor,
        *,
        max_context: int,
        observed: Tensor | None = None,
        sequence: Tensor | None = None,
    ) -> None:
        self.module, self.process = sampler.module, sampler.diffusion.position
        self.shared_frame, self.spacing = sampler.shared_frame, sampler.spacing
        self.embedding, self.sequence, self.max_context = embedding, sequence, max_context
        self.n_dims = self.module.config.n_dims
        self.contexts = split_contexts(len(embedding), max_context, embedding.device)
        self.mean = self._estimate(embedding.new_zeros(1, len(embedding), self.n_dims), embedding.new_ones(1))
        self.known: Tensor | None = None
        if observed is not None:
            self.known = observed.isfinite().all(-1)
            self._fix_frame(observed)

    def _fix_frame(self, observed: Tensor) -> None:
        """Bring the known positions to the canonical frame; the conditional mean determines the rotation only."""
        known = self.known
        x, y = observed[known], self.mean[0, known]
        self.offset = x.mean(0)
        self.rotation = torch.eye(self.n_dims, device=x.device)
        self.shift = torch.zeros_like(self.offset) if not self.shared_frame else self.offset
        if not self.shared_frame:
            self.rotation = kabsch((x - self.offset)[None], (y - y.mean(0))[None])[0]
            self.shift = y.mean(0)
        self.value = (x - self.offset) @ self.rotation + self.shift

    def to_user_frame(self, x: Tensor) -> Tensor:
        """Positions (N, D) of the canonical frame in the frame of the known cells."""
        return (x - self.shift) @ self.rotation.T + self.offset

    @torch.no_grad()
    def average_views(
        self, source: CellSource, rows: NDArray[np.int64], n_views: int, rng: np.random.Generator
    ) -> None:
        """Replace the conditional mean by its average over views, as a network trained with dropout is averaged.

        A view leaves out a random fifth of the genes and divides the slice at random into contexts; each context is
        placed on its own and turned onto the mean of the whole slice.
        """
        n, whole = len(rows), self.mean
        total = torch.zeros_like(whole)
        one = self.embedding.new_ones(1)
        n_contexts = max(1, round(n / VIEW_CONTEXT), -(-n // self.max_context))
        for _ in range(n_views):
            genes = rng.random(source.schema.n_genes) >= VIEW_DROPOUT
            if not (genes & source.measured).any():  # possible with very few genes
                genes = source.measured
            embedding = embed_cells(self.module, source, rows, genes)
            for cells in torch.from_numpy(rng.permutation(n)).tensor_split(n_contexts):
                absent = whole.new_zeros(1, len(cells), self.n_dims)
                h = embedding[cells][None] + self.module.position_missing
                output = self._trunk(h, one, cells, ("position",)).position
                assert output is not None  # it was asked for
                x_0 = self.process.x0(output.float(), absent, one)
                total[:, cells] += x_0 if self.shared_frame else align(x_0, whole[:, cells])
        self.mean = total / n_views

    @torch.no_grad()
    def refine(self, generator: torch.Generator) -> None:
        """Move the cells of the conditional mean towards those that resemble them in the neighborhood embedding."""
        one = self.embedding.new_ones(1)
        feature = self.embedding.new_zeros(len(self.embedding), self.module.config.n_latent)
        for cells, _ in self.contexts:
            h = self.embedding[cells][None] + self.module.position_missing
            latent = self._trunk(h, one, cells, ()).latent
            feature[cells] = F.normalize(self.module.neighborhood(latent)[0].float(), dim=-1)
        self.mean = refine_layout(self.mean[0], feature, generator)[None]

    def _trunk(
        self, h: Tensor, t: Tensor, cells: Tensor, predict: tuple[str, ...], position: Tensor | None = None
    ) -> Prediction:
        """Run the blocks on embeddings ``h`` (1, n, d) of some cells, with their noisy positions, if there are any."""
        sequence = None if self.sequence is None else self.sequence[cells][None]
        return self.module.trunk(h, torch.zeros_like(t), t, None, predict, position=position, sequence=sequence)

    @torch.no_grad()
    def _estimate(self, z: Tensor, t: Tensor) -> Tensor:
        """Estimate of the clean positions (1, N, D)."""
        total = torch.zeros_like(z)
        count = z.new_zeros(1, z.shape[1], 1)
        reference: Tensor | None = None
        for cells, n_anchors in self.contexts:
            h = self.embedding[cells][None] + self.module.embed_position(z[:, cells], t)
            output = self._trunk(h, t, cells, ("position",), z[:, cells]).position
            assert output is not None  # it was asked for
            x_0 = self.process.x0(output.float(), z[:, cells], t)
            if not self.shared_frame:
                x_0 = center(x_0)
                anchors = x_0[:, :n_anchors]
                if reference is None:
                    reference = anchors
                elif n_anchors:
                    rotation = kabsch(center(anchors), center(reference))
                    x_0 = (x_0 - anchors.mean(1, keepdim=True)) @ rotation + reference.mean(1, keepdim=True)
            total[:, cells] += x_0
            count[:, cells] += 1
        x_0 = total / count
        return x_0 if self.shared_frame or len(self.contexts) == 1 else center(x_0)

    def estimate_posterior(self, z: Tensor, t: Tensor) -> GaussianPosterior | None:
        """The posterior of each cell, once the noise is as fine as the spacing of cells; None before, and for a single cell."""
        alpha, sigma = self.process.coefficients(t, z)
        n = (sigma / alpha).reshape(())
        if z.shape[1] < 2 or float(n) > SWITCH * self.spacing:
            return None
        return estimate_posterior(lambda y: self._estimate(alpha * y, t), z / alpha, n, centered=not self.shared_frame)

    def estimate(self, z: Tensor, t: Tensor, posterior: GaussianPosterior | None) -> Tensor:
        """Estimate of the clean positions (1, N, D), by minimum-distance refinement once there is a posterior."""
        if posterior is None:
            return self._estimate(z, t)
        alpha, sigma = self.process.coefficients(t, z)
        x_0 = posterior.refined(self.module.min_distance, z / alpha, (sigma / alpha).reshape(()), self.spacing)
        return x_0 if self.shared_frame else center(x_0)

    @torch.no_grad()
    def sample(
        self, config: SamplingConfig, generator: torch.Generator, on_step: Callable[[], None] | None = None
    ) -> Tensor:
        """Draw positions (N, D) in the canonical frame, or in the frame of the known cells if there are some."""
        posterior: GaussianPosterior | None = None

        def noise() -> Tensor:
            epsilon = torch.randn(1, len(self.embedding), self.n_dims, generator=generator).to(self.embedding.device)
            return epsilon if self.shared_frame else center(epsilon)

        def denoise(z: Tensor, t: Tensor) -> Tensor:
            if self.known is not None:
                z[:, self.known] = self.process.noise(self.value[None], t, noise()[:, self.known])
            if bool((t >= 1).all()):
                x_0 = self.mean.clone()
            else:
                nonlocal posterior
                posterior = posterior or self.estimate_posterior(z, t)
                x_0 = self.estimate(z, t, posterior)
            if self.known is not None:
                x_0[:, self.known] = self.value
            return x_0

        sampler = config.sampler or ("dpm++2m" if self.known is None else "ddpm")
        step = make_step(sampler, self.process, eta=config.eta)
        x = run_sampler(denoise, step, noise, n_steps=config.n_steps, on_step=on_step)[0]
        return x if self.known is None else self.to_user_frame(x)


def canonical_mean(sampler: Sampler, source: CellSource, rows: NDArray[np.int64], *, max_context: int) -> Tensor:
    """Conditional mean of cells given their expression alone, (1, N, D), canonical frame, model units, float64."""
    module = sampler.module
    positions = PositionSampler(
        sampler,
        embed_cells(module, source, rows),
        max_context=max_context,
        sequence=cell_order(module, source, rows),
    )
    return positions.mean.cpu().double()


def rotation_of_cells(
    sampler: Sampler, source: CellSource, rows: NDArray[np.int64], x: NDArray[np.float64], *, max_context: int
) -> NDArray[np.float64]:
    """Rotation (D, D) that brings positions ``x`` of ``rows`` to the conditional mean of these cells."""
    mean = canonical_mean(sampler, source, rows, max_context=max_context)
    return kabsch(center(torch.from_numpy(x)[None]), center(mean))[0].numpy()


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


def check_query(schema: TissueSchema, trained: str, query: AnnData, config: SamplingConfig) -> None:
    """Raise the errors of :meth:`AlphaSTomics.sample` for a query, before a model is trained for it."""
    check_mode(config.mode, trained)
    if query.n_obs == 0:
        raise ValueError("The query has no cells; pass some, or check indices")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sample() warns
        AnnDataSource(query, schema, positions=config.inpaint)


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
    with tqdm(total=total, desc="Placing cells", unit="step", disable=settings.verbosity > logging.INFO) as bar:
        for cells in source.slices:
            _SliceDraws(sampler, source, cells, config, lambda: bar.update()).write(placed)
    return _to_anndata(query, placed, sampler.schema, reduce=config.reduce)


class _SliceDraws:
    """Draws of the positions of one slice.

    The mean and the uncertainty are computed from draws that each use a random half of the genes (bagging, Breiman 1996).
    Draws from the same genes share the deviations of this specimen, and their spread is too small. The distance of the
    medoid from the mean is added to its uncertainty.
    """

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
        self.known: NDArray[np.float64] | None = None  # user units, NaN where unknown
        if cells.position is not None and np.isfinite(cells.position).all(1).any():
            self.known = cells.position[np.searchsorted(cells.rows, self.rows)]
        self.free = self.known is None and not sampler.shared_frame

    def write(self, placed: Placed) -> None:
        """Write the rows of this slice to ``placed``."""
        rows, n_samples, reduce = self.rows, self.config.n_samples, self.config.reduce
        averaged = reduce == "mean" and n_samples > 1
        if not averaged:
            positions = self._positions(n_views=self.config.n_views)
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
                away = self._distance(mean_of(halves), draws[placed.medoid[rows[0]]])
                placed.uncertainty[rows] = np.hypot(placed.uncertainty[rows], away)
        placed.draws[:, rows] = draws
        if self.known is not None:
            finite = np.isfinite(self.known).all(1)
            placed.draws[:, rows[finite]] = self.known[finite]
            placed.uncertainty[rows[finite]] = 0.0

    def _positions(self, genes: NDArray[np.bool_] | None = None, n_views: int = 1) -> PositionSampler:
        module, seed, known = self.sampler.module, self.config.random_state, self.known
        observed = None if known is None else torch.from_numpy(self.sampler.schema.encode_position(known))
        positions = PositionSampler(
            self.sampler,
            embed_cells(module, self.source, self.rows, genes),
            max_context=self.config.max_context,
            observed=None if observed is None else observed.to(module.device),
            sequence=cell_order(module, self.source, self.rows),
        )
        if n_views > 1:
            positions.average_views(self.source, self.rows, n_views, np.random.default_rng([seed, VIEWS]))
        if self.config.refine:
            positions.refine(draw_generator(seed, 0, LAYOUT))
        return positions

    def _draw(self, positions: PositionSampler, k: int) -> NDArray[np.float64]:
        # The generator does not depend on the other slices.
        x = positions.sample(self.config, draw_generator(self.config.random_state, k), self.on_step).cpu().numpy()
        return self.sampler.to_user(x, in_user_frame=self.known is not None)

    def _half_of_genes(self, k: int) -> NDArray[np.bool_] | None:
        """The genes (G,) of draw ``k``: two draws together use each measured gene once; None for a single gene."""
        genes = np.flatnonzero(self.source.measured)
        if len(genes) < 2:
            return None
        shuffled = np.random.default_rng([self.config.random_state, HALVES, k // 2]).permutation(genes)
        seen = np.zeros(self.source.schema.n_genes, dtype=bool)
        seen[shuffled[k % 2 :: 2]] = True
        return seen

    def _distance(self, middle: NDArray[np.float64], medoid: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distance (n,) of the cells of the medoid from the mean (n, D), aligned in a free frame."""
        if self.free:
            middle = align(*(torch.from_numpy(each)[None] for each in (middle, medoid)))[0].numpy()
        return np.linalg.norm(middle - medoid, axis=1)


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
        bare.obsm[key] = mean_of(placed.draws)
    bare.obs[_keys.POSITION_UNCERTAINTY] = placed.uncertainty
    return stack_draws([bare], slice_key)
