"""From cells with positions to an AnnData with sampled expression."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from scvi import settings
from tqdm.auto import tqdm

from alphastomics import _keys
from alphastomics.data import AnnDataSource, local_density, read_partial
from alphastomics.data._contexts import LOWEST_DENSITY
from alphastomics.diffusion.deformation import deform
from alphastomics.sampling._calibration import pooled_sd
from alphastomics.sampling._draws import check_draws, draw_generator, stack_draws
from alphastomics.sampling._expression import ExpressionSampler
from alphastomics.sampling._frames import rotation_of_cells
from alphastomics.sampling._position import cell_order, content_order
from alphastomics.train.defaults import default_deformation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import PartialExpression, SliceCells, TissueSchema
    from alphastomics.model._model import AlphaSTomics
    from alphastomics.sampling._position import SamplerConfig

logger = logging.getLogger(__name__)

LEAST_COUNT = 1e-3
FRAME_CELLS = 20  # known cells that fix a frame
OVERLAP = 1.0  # model units between the centers of two slices up to which they overlap: about the radius of a slice
VIEWS = 4  # keeps the draws of views apart from those of the chain


def sample_expression(
    model: AlphaSTomics,
    query: AnnData,
    config: SamplerConfig,
    *,
    n_samples: int,
    reduce: str | None,
    inpaint: bool,
    random_state: int,
) -> AnnData:
    """Write expression into places; see :meth:`AlphaSTomics.sample`."""
    check_draws(n_samples, reduce)
    source = AnnDataSource(query, model.schema, positions=True, expression=False)
    for cells in source.slices:
        if cells.position is None or not np.isfinite(cells.position).all():
            raise ValueError(
                f'Slice {cells.name!r} has cells without a position in obsm["{model.schema.position_key}"]; '
                "place them first (mode='expr_to_pos'), or remove them."
            )
    known = read_partial(query, model.schema) if inpaint else None
    logger.info(
        "Writing expression into %d places in %d slices: %d draws of %d steps on %s.",
        source.n_cells, len(source.slices), n_samples, config.n_steps, model.module.device,
    )  # fmt: skip
    total = len(source.slices) * n_samples * config.n_steps
    draws = np.empty((n_samples, source.n_cells, model.schema.n_genes), dtype=np.float32)
    mean, slices = np.empty(draws.shape[1:], dtype=np.float32), []
    with tqdm(total=total, desc="Sampling expression", unit="step", disable=settings.verbosity > logging.INFO) as bar:
        for cells in source.slices:
            chain, rows = _slice_chain(model, query, source, cells, config, known)
            if reduce == "mean":
                assert cells.position is not None  # as above
                places = cells.position[np.searchsorted(cells.rows, rows)]
                mean[rows] = _mean_over_views(chain, places, n_samples, random_state, deformation=_deformation(model))
            for k in range(n_samples):
                # Two draws share their noise up to its sign; `pooled_sd` counts on it.
                generator = draw_generator(random_state, k // 2)
                x = chain.sample(config, generator, mirrored=bool(k % 2), on_step=lambda: bar.update())
                draws[k, rows] = x.cpu().numpy()
            slices.append(rows)
    return to_anndata(model, query, draws, known, reduce=reduce, mean=mean if reduce == "mean" else None, slices=slices)


def _slice_chain(
    model: AlphaSTomics,
    query: AnnData,
    source: AnnDataSource,
    cells: SliceCells,
    config: SamplerConfig,
    known: PartialExpression | None,
) -> tuple[ExpressionSampler, NDArray[np.int64]]:
    """The chain of one slice, and the rows of the query in the order of its cells."""
    assert cells.position is not None  # sample_expression refuses
    # Sorted by position: the noise of a cell then does not depend on the order of the rows.
    order = np.lexsort(cells.position.T)
    rows, device = cells.rows[order], model.module.device
    network = None if known is None else torch.from_numpy(known.network[rows]).to(device)
    crowd = torch.from_numpy(local_density(cells.position[order])).to(device)
    sequence = cell_order(model.module, source, rows)
    chains = [
        ExpressionSampler(
            model.module,
            model.diffusion,
            torch.from_numpy(position).to(device),
            max_context=config.max_context,
            known=network if network is not None and bool(network.isfinite().any()) else None,
            local_density=crowd,
            dependence=model.dependence_,
            exemplars=model.exemplars_,
            sequence=sequence,
        )
        for position in _frames(model, query, rows, cells.position[order], known)
    ]
    return _better_frame(chains), rows


def _better_frame(chains: list[ExpressionSampler]) -> ExpressionSampler:
    """The first chain, unless another explains the known cells better by more than chance (two standard errors)."""
    first, best, gain = chains[0], chains[0], 0.0
    for other in chains[1:]:
        difference = first.error - other.error
        mean, error = float(difference.mean()), float(difference.std()) / len(difference) ** 0.5
        if mean > max(gain, 2 * error):
            best, gain = other, mean
    return best


def _deformation(model: AlphaSTomics) -> float:
    """Strength with which views are deformed: that of the last training, which leaves positions of a shared frame alone."""
    if model.schema.frame == "shared":
        return 0.0
    if model.deformation_ is None:  # saved before the strength was
        return default_deformation(int(model.summary_stats.n_cells))
    return model.deformation_


def _mean_over_views(
    chain: ExpressionSampler, places: NDArray[np.float64], n_views: int, random_state: int, *, deformation: float
) -> NDArray[np.float32]:
    """Conditional mean (N, G), averaged over views: as in training, the slice is deformed, and cells are left out of the local density.

    The estimate of clean expression is a martingale along the chain: at every step its mean over draws is the conditional
    mean, and at the first step, where nothing was drawn yet, it is that without noise.
    """
    position, means = chain.position[0], []
    for k in range(n_views):
        rng = np.random.default_rng([random_state, VIEWS, k])
        among = rng.random(len(places)) < rng.uniform(LOWEST_DENSITY, 1.0)
        crowd = torch.from_numpy(local_density(places, among=among)).to(position.device)
        means.append(chain.mean(crowd, deform(position, deformation, rng)).cpu().numpy())
    return np.stack(means).mean(axis=0, dtype=np.float64).astype(np.float32)


def _frames(
    model: AlphaSTomics,
    query: AnnData,
    rows: NDArray[np.int64],
    position: NDArray[np.float64],
    known: PartialExpression | None,
) -> list[NDArray[np.float32]]:
    """Positions in what may be the canonical frame: that of the reference, and the one that known cells fix.

    A slice that overlaps with the first reference slice is taken as registered to it, its center included: where tissue is
    missing at one side, the center of what is left is not that of a whole slice.
    """
    schema = model.schema
    if schema.frame == "shared":
        return [schema.encode_position(position)]
    if model.frame_ is None:
        raise RuntimeError("The model has no reference frame; train it or load a trained one")
    rotation, center = np.asarray(model.frame_.rotation).T, position.mean(axis=0)
    x = (position - center) / schema.scale
    shift = (center - np.asarray(model.frame_.centroid)) / schema.scale
    frames = [(x + shift if np.linalg.norm(shift) < OVERLAP else x) @ rotation]
    whole = np.zeros(len(rows), dtype=bool) if known is None else np.isfinite(known.values[rows]).all(axis=1)
    if whole.sum() >= FRAME_CELLS:
        frames.append(x @ _frame_of_known(model, query[rows[whole]].copy(), x[whole]))
    return [frame.astype(np.float32) for frame in frames]


def _frame_of_known(model: AlphaSTomics, cells: AnnData, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation of positions ``x`` that brings cells to where the model expects them by their expression."""
    source = AnnDataSource(cells, model.schema, positions=False)
    rows = content_order(source, np.arange(source.n_cells))
    return rotation_of_cells(model, source, rows, x[rows], max_context=source.n_cells)


def to_anndata(
    model: AlphaSTomics,
    query: AnnData,
    draws: NDArray[np.float32],
    known: PartialExpression | None,
    *,
    reduce: str | None,
    mean: NDArray[np.float32] | None = None,
    slices: Sequence[NDArray[np.int64]] = (),
) -> AnnData:
    """The query's cells with sampled expression, in the units of the reference.

    Parameters
    ----------
    mean
        Conditional mean (n_cells, G) in network units, for ``reduce="mean"``.
    slices
        Rows of each slice, in an order that does not depend on the query's; also for ``reduce="mean"``.
    """
    schema = model.schema
    size = np.full(query.n_obs, np.nan) if known is None else known.library_size
    size = np.where(np.isfinite(size) & (size > 0), size, schema.library_size or np.nan)

    def decode(x: NDArray[np.float32], *, drawn: bool = True) -> NDArray[np.float32]:
        values = decode_draw(model, x, size) if drawn else schema.decode_expression(x, size)
        return values if known is None else np.where(np.isfinite(known.values), known.values, values).astype(np.float32)

    bare = ad.AnnData(obs=query.obs.copy(), var=reference_genes(model), shape=(query.n_obs, schema.n_genes))
    bare.obsm[schema.position_key] = np.array(query.obsm[schema.position_key], dtype=np.float64)
    if schema.transform == "log1p":
        bare.obs[_keys.LIBRARY_SIZE] = size
    values = [decode(x) for x in draws]
    if reduce == "mean":
        assert mean is not None
        average = decode(mean, drawn=False)
        drawn = np.ones(mean.shape, dtype=bool) if known is None else ~np.isfinite(known.values)
        sd = np.zeros_like(average)
        for rows in slices:
            here = np.stack([x[rows] for x in values])
            sd[rows] = pooled_sd(here, average[rows], drawn[rows], counts=schema.transform == "log1p")
        bare.layers[_keys.SD] = sd
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


def decode_draw(
    model: AlphaSTomics, x: NDArray[np.float32], library_size: NDArray[np.float64] | None = None
) -> NDArray[np.float32]:
    """Expression (N, G) in user units from a draw in network units, with the marginals of the reference."""
    x = x if model.marginals_ is None else model.marginals_.apply(x)
    values = model.schema.decode_expression(x, library_size)
    if model.schema.transform == "log1p":  # a zero count that went there and back is not quite 0
        values[values < LEAST_COUNT] = 0.0
    return values


def store_expression(table: AnnData, values: NDArray[np.float32], schema: TissueSchema) -> None:
    """Put expression where the reference has it, and into ``X``; sparse where it is of counts."""
    table.X = sp.csr_matrix(values) if schema.transform == "log1p" else values
    if schema.layer is not None:
        table.layers[schema.layer] = table.X.copy()


def reference_genes(model: AlphaSTomics) -> pd.DataFrame:
    """``var`` of the reference, or its gene names where it is not at hand."""
    genes = list(model.schema.genes)
    adata = model.adata
    return pd.DataFrame(index=pd.Index(genes)) if adata is None else adata.var.loc[genes].copy()
