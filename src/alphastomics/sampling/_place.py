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
from alphastomics.diffusion.geometry import align
from alphastomics.sampling._draws import check_draws, check_effect, draw_generator, stack_draws
from alphastomics.sampling._position import (
    PositionSampler,
    SamplerConfig,
    align_draws,
    cell_order,
    content_order,
    embed_cells,
)

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import AnnDataSource, SliceCells
    from alphastomics.model._model import AlphaSTomics

logger = logging.getLogger(__name__)

VIEWS, LAYOUT, HALVES = 1, 2, 3  # keep the draws of views, layout and halves of the genes apart from those of the chain


class Placed(NamedTuple):
    """Positions of the cells of a query.

    Attributes
    ----------
    draws
        (K, n_cells, D), user units.
    medoid
        Number of the medoid draw of each cell's slice, (n_cells,).
    uncertainty
        Root mean square distance of draws that each see half of the genes from what is returned, (n_cells,), user units;
        NaN where there is none: it was not asked for, or there is a single draw.
    """

    draws: NDArray[np.float64]
    medoid: NDArray[np.int64]
    uncertainty: NDArray[np.float64]


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
    placed = place(model, source, config, n_samples=n_samples, reduce=reduce, random_state=random_state)
    return to_anndata(model, query, placed, reduce=reduce)


def check_query(
    model: AlphaSTomics, query: AnnData, *, n_samples: int, n_steps: int, inpaint: bool, **sampler: Any
) -> None:
    """Refuse what :meth:`AlphaSTomics.sample` will refuse, before a model is trained for it."""
    model._check_mode("expr_to_pos", None)
    check_draws(n_samples, None)
    check_effect("expr_to_pos", SamplerConfig(n_steps=n_steps, **sampler), n_samples=n_samples, reduce=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sample() will tell
        model._query_source(query, positions=inpaint)


def place(
    model: AlphaSTomics,
    source: AnnDataSource,
    config: SamplerConfig,
    *,
    n_samples: int,
    reduce: str | None,
    random_state: int,
) -> Placed:
    """Draw positions of every slice of ``source``, aligned over draws where the frame is free."""
    n_dims = model.schema.n_dims
    placed = Placed(
        np.empty((n_samples, source.n_cells, n_dims)),
        np.zeros(source.n_cells, dtype=np.int64),
        np.full(source.n_cells, np.nan),
    )
    logger.info(
        "Placing %d cells in %d slices: %d draws of %d steps on %s.",
        source.n_cells, len(source.slices), n_samples, config.n_steps, model.module.device,
    )  # fmt: skip
    total = len(source.slices) * n_samples * config.n_steps * (2 if reduce == "medoid" else 1)
    with tqdm(total=total, desc="Placing cells", unit="step", disable=settings.verbosity > logging.INFO) as bar:
        for cells in source.slices:
            _place_slice(model, source, cells, config, reduce, random_state, placed, bar)
    return placed


def _place_slice(
    model: AlphaSTomics,
    source: AnnDataSource,
    cells: SliceCells,
    config: SamplerConfig,
    reduce: str | None,
    random_state: int,
    placed: Placed,
    bar: tqdm,
) -> None:
    """Write what ``placed`` says of one slice in place.

    The mean and the uncertainty are of draws that each see a random half of the genes: bagging (Breiman 1996). Draws that
    all see the same genes agree on what is peculiar to the genes of this specimen, and their spread says too little. The
    medoid lies off the mean, by which its uncertainty is larger.
    """
    schema, device = model.schema, model.module.device
    rows = content_order(source, cells.rows)
    known = _known_positions(cells, rows)
    observed = None if known is None else torch.from_numpy(schema.encode_position(known)).to(device)
    free = known is None and schema.frame == "slice"
    n_samples = len(placed.draws)

    def positions(genes: NDArray[np.bool_] | None = None, n_views: int = 1) -> PositionSampler:
        chain = PositionSampler(
            model.module,
            model.diffusion,
            embed_cells(model.module, source, rows, device, genes),
            shared_frame=schema.frame == "shared",
            spacing=schema.spacing / schema.scale,
            max_context=config.max_context,
            observed=observed,
            sequence=cell_order(model.module, source, rows),
        )
        if n_views > 1:
            chain.average_views(source, rows, n_views, np.random.default_rng([random_state, VIEWS]))
        if config.refine:
            chain.refine(draw_generator(random_state, 0, LAYOUT))
        return chain

    def draw(chain: PositionSampler, k: int) -> NDArray[np.float64]:
        # The draws of a slice depend on its cells and the seed, not on which other slices there are.
        x = chain.sample(config, draw_generator(random_state, k), lambda: bar.update()).cpu().numpy()
        return to_user(model, x, in_user_frame=known is not None)

    averaged = reduce == "mean" and n_samples > 1
    if not averaged:
        chain = positions(n_views=config.n_views)
        draws = np.stack([draw(chain, k) for k in range(n_samples)])
        if n_samples > 1:
            draws, placed.medoid[rows] = align_draws(draws, rigid=free)
    if reduce is not None and n_samples > 1:
        halves = np.stack([draw(positions(_half_of_genes(source, random_state, k)), k) for k in range(n_samples)])
        halves, _ = align_draws(halves, rigid=free)
        placed.uncertainty[rows] = spread(halves)
        if averaged:
            draws = halves
        else:
            medoid = draws[placed.medoid[rows[0]]]
            middle = mean_of(halves)
            if free:
                middle = align(*(torch.from_numpy(each)[None] for each in (middle, medoid)))[0].numpy()
            away = np.linalg.norm(middle - medoid, axis=1)
            placed.uncertainty[rows] = np.hypot(placed.uncertainty[rows], away)
    placed.draws[:, rows] = draws
    if known is not None:
        finite = np.isfinite(known).all(1)
        placed.draws[:, rows[finite]] = known[finite]
        placed.uncertainty[rows[finite]] = 0.0


def _half_of_genes(source: AnnDataSource, random_state: int, k: int) -> NDArray[np.bool_] | None:
    """The genes (G,) that draw ``k`` sees: two draws together see each measured gene once; None where there is one gene."""
    genes = np.flatnonzero(source.measured)
    if len(genes) < 2:
        return None
    shuffled = np.random.default_rng([random_state, HALVES, k // 2]).permutation(genes)
    seen = np.zeros(source.schema.n_genes, dtype=bool)
    seen[shuffled[k % 2 :: 2]] = True
    return seen


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
    """Standard deviation of aligned draws (K, n, D) over all dimensions together, per cell (n,), in their units."""
    return np.sqrt(((draws - mean_of(draws)) ** 2).sum(-1).sum(0) / (len(draws) - 1))


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
    bare.obs[_keys.POSITION_UNCERTAINTY] = placed.uncertainty
    return stack_draws([bare], slice_key)
