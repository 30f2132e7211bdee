r"""Draws of the expression of a query at given positions, or its conditional mean and standard deviation.

The conditional mean of a slice is averaged over K views,

.. math:: \bar x = \frac1K \sum_k f\big(z = 0,\, t = 1;\, p^{(k)}, \rho^{(k)}\big),

each of which deforms the positions p as in training, and computes the local density :math:`\rho` among a random part of the
cells. The estimate of clean expression is a martingale along the reverse process: at every step its mean over draws is the
conditional mean, and at the first step, before anything is drawn, it has no noise.
"""

from __future__ import annotations

import logging
import zlib
from typing import TYPE_CHECKING, NamedTuple

import anndata as ad
import numpy as np
import torch

from alphastomics import _keys
from alphastomics.data import AnnDataSource, local_density, read_partial
from alphastomics.data._contexts import MIN_DENSITY
from alphastomics.diffusion.deformation import deform, draw_deformation
from alphastomics.sampling._calibration import pooled_sd
from alphastomics.sampling._canonical import candidate_positions
from alphastomics.sampling._cells import cell_order, content_order, encode_cells
from alphastomics.sampling._draws import draw_generator, progress_bar, stack_draws, store_expression
from alphastomics.sampling._expression import ExpressionSampler

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.config import SamplingConfig
    from alphastomics.data import PartialExpression
    from alphastomics.sampling._cells import EncodedCells
    from alphastomics.sampling._sampler import Sampler

logger = logging.getLogger(__name__)

MIN_FRAME_CELLS = 20  # complete cells from which the rotation of a slice is estimated
VIEWS = 4  # key of the generators of views


class SliceQuery(NamedTuple):
    """What is read of one slice. Cells are sorted by position, so that their noise does not depend on the order of the rows.

    Attributes
    ----------
    name
        Name of the slice, a key of its generators: slices have independent noise, whatever others are drawn with them.
    rows
        Rows of the cells in the query, (N,).
    position
        Positions in user units, (N, D).
    observed
        Observed expression (N, G) in network units, NaN elsewhere; None if nothing is observed.
    sequence
        Index of the cells in their order, (N,); None if the network reads none.
    complete
        Indices (n,) of the cells of which all genes are observed, and these cells; None for fewer than 20 of them, or in a
        shared frame.
    """

    name: str
    rows: NDArray[np.int64]
    position: NDArray[np.float64]
    observed: Tensor | None
    sequence: Tensor | None
    complete: tuple[NDArray[np.int64], EncodedCells] | None


Read = tuple[list[SliceQuery], "PartialExpression | None"]


def sample_expression(
    sampler: Sampler, query: AnnData, read: Read, var: pd.DataFrame, config: SamplingConfig
) -> AnnData:
    """Predict the expression of cells at their positions; see :meth:`AlphaSTomics.sample`.

    ``read`` is what :func:`read_slices` returns for the query. ``var`` describes the genes of the result.
    """
    schema, (slices, observed) = sampler.schema, read
    logger.info(
        "Predicting expression at %d positions in %d slices: %d draws of %d steps on %s.",
        query.n_obs, len(slices), config.n_samples, config.n_steps, sampler.device,
    )  # fmt: skip
    draws, mean = _draw(sampler, slices, config, n_cells=query.n_obs)
    size = np.full(query.n_obs, np.nan) if observed is None else observed.library_size
    size = np.where(np.isfinite(size) & (size > 0), size, schema.library_size or np.nan)
    values = [_complete(sampler.decode_draw(x, size), observed) for x in draws]
    own = query[:, :0].copy()
    bare = ad.AnnData(obs=own.obs, var=var, obsm=own.obsm, uns=own.uns, shape=draws.shape[1:])
    if schema.transform == "log1p":
        bare.obs[_keys.LIBRARY_SIZE] = size
    if mean is not None:
        average = _complete(schema.decode_expression(mean, size), observed)
        free: NDArray[np.bool_] = (
            np.ones(average.shape, dtype=bool) if observed is None else ~np.isfinite(observed.values)
        )
        sd = np.zeros_like(average)
        for rows in (cells.rows for cells in slices):
            samples = np.stack([x[rows] for x in values])
            sd[rows] = pooled_sd(samples, average[rows], free[rows], counts=schema.transform == "log1p")
        bare.layers[_keys.SD] = sd
        values = [average]
    elif config.reduce == "medoid":
        values = [values[_medoid(draws)]]
    tables = []
    for x in values:
        table = bare.copy()
        store_expression(table, x, schema)
        tables.append(table)
    result = stack_draws(tables, schema.slice_key)
    result.uns = bare.uns
    return result


def read_slices(sampler: Sampler, query: AnnData, *, inpaint: bool) -> Read:
    """Read the slices of a query, and with ``inpaint`` the observed expression of all its cells.

    Raises
    ------
    ValueError
        If a cell has no position.
    """
    schema, module = sampler.schema, sampler.module
    source = AnnDataSource(query, schema, positions=True, expression=False)
    observed = read_partial(query, schema) if inpaint else None
    complete: NDArray[np.bool_] = np.zeros(query.n_obs, dtype=bool)
    if observed is not None:
        complete[:] = np.isfinite(observed.values).all(axis=1)
    slices = []
    for name, rows, position in source.slices:
        if position is None or not np.isfinite(position).all():
            raise ValueError(
                f'Slice {name!r} has cells without a position in obsm["{schema.position_key}"]; '
                "store positions there, such as those of tl.reconstruct, or remove these cells"
            )
        order = np.lexsort(position.T)
        rows = rows[order]
        network = None if observed is None else torch.from_numpy(observed.network[rows]).to(sampler.device)
        index, encoded = np.flatnonzero(complete[rows]), None
        if len(index) >= MIN_FRAME_CELLS and not sampler.shared_frame:
            known_genes = query.var_names.isin(schema.genes)
            part = AnnDataSource(query[rows[index], known_genes].copy(), schema, positions=False)
            within = content_order(part, np.arange(len(index)))
            encoded = index[within], encode_cells(module, part, within, max_context=len(index))
        slices.append(
            SliceQuery(
                name=name,
                rows=rows,
                position=position[order],
                observed=network if network is not None and bool(network.isfinite().any()) else None,
                sequence=cell_order(module, source, rows),
                complete=encoded,
            )
        )
    return slices, observed


def _draw(
    sampler: Sampler, slices: list[SliceQuery], config: SamplingConfig, *, n_cells: int
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Draws (K, n_cells, G) in network units and, with ``reduce="mean"``, the conditional mean (n_cells, G)."""
    draws = np.empty((config.n_samples, n_cells, sampler.schema.n_genes), dtype=np.float32)
    mean = np.empty(draws.shape[1:], dtype=np.float32) if config.reduce == "mean" else None
    total = len(slices) * config.n_samples * config.n_steps
    with progress_bar(total, "Sampling expression") as bar:
        for cells in slices:
            expression = _slice_sampler(sampler, cells, config)
            if mean is not None:
                mean[cells.rows] = _mean_over_views(expression, cells.position, config, sampler.deformation)
            for k in range(config.n_samples):
                generator = draw_generator(config.random_state, k, zlib.crc32(cells.name.encode()))
                x = expression.sample(config, generator, on_step=lambda: bar.update())
                draws[k, cells.rows] = x.cpu().numpy()
    return draws, mean


def _slice_sampler(sampler: Sampler, cells: SliceQuery, config: SamplingConfig) -> ExpressionSampler:
    """The sampler of one slice, in the frame that suits its observed cells."""
    density = torch.from_numpy(local_density(cells.position)).to(sampler.device)
    candidates = [
        ExpressionSampler(
            sampler,
            torch.from_numpy(position).to(sampler.device),
            max_context=config.max_context,
            observed=cells.observed,
            local_density=density,
            sequence=cells.sequence,
        )
        for position in candidate_positions(sampler, cells.position, cells.complete)
    ]
    return _better_frame(candidates)


def _better_frame(candidates: list[ExpressionSampler]) -> ExpressionSampler:
    """The first candidate, unless another predicts the complete cells better by more than two standard errors."""
    first, best, gain = candidates[0], candidates[0], 0.0
    for other in candidates[1:]:
        difference = first.error - other.error
        mean, error = float(difference.mean()), float(difference.std()) / len(difference) ** 0.5
        if mean > max(gain, 2 * error):
            best, gain = other, mean
    return best


def _mean_over_views(
    expression: ExpressionSampler, position: NDArray[np.float64], config: SamplingConfig, deformation: float
) -> NDArray[np.float32]:
    """Conditional mean (N, G) of the cells at ``position`` (N, D) in user units, averaged over views."""
    canonical, means = expression.position[0], []
    for k in range(config.n_samples):
        rng = np.random.default_rng([config.random_state, VIEWS, k])
        among = rng.random(len(position)) < rng.uniform(MIN_DENSITY, 1.0)
        density = torch.from_numpy(local_density(position, among=among)).to(canonical.device)
        deformed = deform(canonical, draw_deformation(canonical.shape[1], deformation, rng))
        means.append(expression.mean(density, deformed).cpu().numpy())
    return np.stack(means).mean(axis=0, dtype=np.float64).astype(np.float32)


def _complete(values: NDArray[np.float32], observed: PartialExpression | None) -> NDArray[np.float32]:
    """Values (n_cells, G) in user units, with those that are observed as they are."""
    if observed is None:
        return values
    return np.where(np.isfinite(observed.values), observed.values, values).astype(np.float32)


def _medoid(draws: NDArray[np.float32]) -> int:
    """Number of the draw (n_cells, G), of K, that is nearest to all others."""
    flat = draws.reshape(len(draws), -1).astype(np.float64)
    gram = flat @ flat.T
    distance = np.diag(gram)[:, None] + np.diag(gram) - 2 * gram
    return int(distance.sum(1).argmin())
