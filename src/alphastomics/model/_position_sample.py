"""From a query to an AnnData of sampled cells."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import anndata as ad
import numpy as np
import torch
from scvi import settings
from tqdm.auto import tqdm

from alphastomics import _keys
from alphastomics.model._draws import check_draws, draw_generator, stack_draws
from alphastomics.model._position_chain import SamplerConfig, SlicePositions, align_draws, content_order, embed_cells

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import AnnDataSource, SliceCells
    from alphastomics.model._model import AlphaSTomics

logger = logging.getLogger(__name__)

VIEWS, LAYOUT = 1, 2  # keep the draws of views and of the layout apart from those of the chain


class Placed(NamedTuple):
    """Positions of the cells of a query.

    Attributes
    ----------
    draws
        (K, n_cells, D), user units.
    medoid
        Number of the medoid draw of each cell's slice, (n_cells,).
    """

    draws: NDArray[np.float64]
    medoid: NDArray[np.int64]


def sample_positions(
    model: AlphaSTomics,
    query: AnnData,
    source: AnnDataSource,
    config: SamplerConfig,
    *,
    n_samples: int,
    reduce: str | None,
    random_state: int,
) -> AnnData:
    """Place the cells of a query; see :meth:`AlphaSTomics.sample`."""
    check_draws(n_samples, reduce)
    placed = place(model, source, config, n_samples=n_samples, random_state=random_state)
    return to_anndata(model, query, placed, reduce=reduce)


def check_query(
    model: AlphaSTomics, query: AnnData, *, n_samples: int, n_steps: int, inpaint: bool, **sampler: Any
) -> None:
    """Refuse what :meth:`AlphaSTomics.sample` will refuse, before a model is trained for it."""
    model._check_mode("expr_to_pos", None)
    check_draws(n_samples, None)
    SamplerConfig(n_steps=n_steps, **sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sample() will tell
        model._query_source(query, positions=inpaint)


def place(
    model: AlphaSTomics, source: AnnDataSource, config: SamplerConfig, *, n_samples: int, random_state: int
) -> Placed:
    """Draw positions of every slice of ``source``, aligned over draws where the frame is free."""
    n_dims = model.schema.n_dims
    draws = np.empty((n_samples, source.n_cells, n_dims))
    medoid = np.zeros(source.n_cells, dtype=np.int64)
    logger.info(
        "Placing %d cells in %d slices: %d draws of %d steps on %s.",
        source.n_cells, len(source.slices), n_samples, config.n_steps, model.module.device,
    )  # fmt: skip
    total = len(source.slices) * n_samples * config.n_steps
    with tqdm(total=total, desc="Placing cells", unit="step", disable=settings.verbosity > logging.INFO) as bar:
        for cells in source.slices:
            _place_slice(model, source, cells, config, random_state, draws, medoid, bar)
    return Placed(draws, medoid)


def _place_slice(
    model: AlphaSTomics,
    source: AnnDataSource,
    cells: SliceCells,
    config: SamplerConfig,
    random_state: int,
    draws: NDArray[np.float64],
    medoid: NDArray[np.int64],
    bar: tqdm,
) -> None:
    """Write the draws of one slice and the number of its medoid in place."""
    schema, device = model.schema, model.module.device
    rows = content_order(source, cells.rows)
    known = _known_positions(cells, rows)
    held = None if known is None else torch.from_numpy(schema.encode_position(known)).to(device)
    positions = SlicePositions(
        model.module,
        model.diffusion,
        embed_cells(model.module, source, rows, device),
        shared_frame=schema.frame == "shared",
        spacing=schema.spacing / schema.scale,
        max_context=config.max_context,
        held=held,
    )
    if config.n_views > 1:
        positions.average_views(source, rows, config.n_views, np.random.default_rng([random_state, VIEWS]))
    if config.refine:
        positions.refine(draw_generator(random_state, 0, LAYOUT))
    for k in range(len(draws)):
        # The draws of a slice depend on its cells and the seed, not on which other slices there are.
        x = positions.sample(config, draw_generator(random_state, k), lambda: bar.update()).cpu().numpy()
        draws[k, rows] = to_user(model, x, in_user_frame=known is not None)
    free = known is None and schema.frame == "slice"
    if len(draws) > 1:
        draws[:, rows], medoid[rows] = align_draws(draws[:, rows], rigid=free)
    if known is not None:
        finite = np.isfinite(known).all(1)
        draws[:, rows[finite]] = known[finite]


def _known_positions(cells: SliceCells, rows: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Positions of ``rows`` in user units, NaN where unknown; None when none is known."""
    if cells.position is None or not np.isfinite(cells.position).all(1).any():
        return None
    return cells.position[np.searchsorted(cells.rows, rows)]


def to_user(model: AlphaSTomics, x: NDArray[np.float32], *, in_user_frame: bool = False) -> NDArray[np.float64]:
    """Positions (N, D) in user units, from the canonical frame or, with ``in_user_frame``, from that of the user."""
    if in_user_frame or model.schema.frame == "shared":
        return model.schema.decode_position(x)
    if model.frame_ is None:
        raise RuntimeError("The model has no reference frame; train it or load a trained one")
    return model.frame_.to_user(x, model.schema)


def mean_of(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of draws (K, n, D), to the bit where all agree, as those of a held cell do."""
    return draws[0] + (draws - draws[0]).mean(0)


def spread(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Root-mean-square distance of aligned draws (K, n, D) from their mean, per cell (n,), in their units."""
    return np.sqrt(((draws - mean_of(draws)) ** 2).sum(-1).mean(0))


def to_anndata(model: AlphaSTomics, query: AnnData, placed: Placed, *, reduce: str | None) -> AnnData:
    """The query with sampled positions in place of its own."""
    key, slice_key = model.schema.position_key, model.schema.slice_key
    # A copy: what is done to the result in place (scanpy's transforms) must not reach the query.
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
    bare.obs[_keys.POSITION_UNCERTAINTY] = spread(placed.draws)
    return stack_draws([bare], slice_key)
