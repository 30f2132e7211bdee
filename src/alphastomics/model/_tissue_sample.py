"""New slices as an AnnData."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import torch
from scvi import settings
from tqdm.auto import tqdm

from alphastomics import _keys
from alphastomics.data import crowding
from alphastomics.data._slices import DEFAULT_SLICE_KEY
from alphastomics.model._calibration import place_time
from alphastomics.model._draws import check_draws, draw_generator, stack_draws
from alphastomics.model._expression_chain import SliceExpression
from alphastomics.model._expression_sample import decode_draw, reference_genes, store_expression
from alphastomics.model._position_sample import to_user
from alphastomics.model._tissue_chain import SliceTissue

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from torch import Tensor

    from alphastomics.model._model import AlphaSTomics
    from alphastomics.model._position_chain import SamplerConfig

logger = logging.getLogger(__name__)


def sample_tissue(
    model: AlphaSTomics, n_cells: int, config: SamplerConfig, *, n_samples: int, reduce: str | None, random_state: int
) -> AnnData:
    """Draw whole slices; see :meth:`AlphaSTomics.sample`."""
    check_draws(n_samples, reduce)
    if reduce is not None:
        raise ValueError(f"reduce={reduce!r} has no meaning for mode='joint': the cells of two draws are not the same")
    if n_cells < 1:
        raise ValueError(f"n_cells must be at least 1, got {n_cells}")
    schema, outlines = model.schema, model.outlines_
    assert outlines is not None  # a trained model that draws tissue has them
    tissue = SliceTissue(
        model.module,
        model.diffusion,
        n_cells,
        shared_frame=schema.frame == "shared",
        spacing=schema.spacing / schema.scale,
        max_context=config.max_context,
    )
    logger.info(
        "Drawing %d slices of %d cells in %d steps on %s.", n_samples, n_cells, config.n_steps, tissue.module.device
    )
    tables = []
    total = 2 * n_samples * config.n_steps
    with tqdm(total=total, desc="Drawing tissue", unit="step", disable=settings.verbosity > logging.INFO) as bar:
        for k in range(n_samples):
            generator = draw_generator(random_state, k)
            _, position = tissue.sample(config, generator, lambda: bar.update())
            number = int(torch.randint(len(outlines.quantiles), (), generator=generator))
            moved = torch.from_numpy(outlines.apply(position.cpu().numpy(), number))
            position = tissue.packed(moved.to(position), generator)
            expression = _expression_in(
                model, position, config, generator, lambda: bar.update(), sequence=tissue.sequence
            )
            names = [f"cell_{i}" for i in range(n_cells)]
            table = ad.AnnData(
                obs=pd.DataFrame({schema.slice_key or DEFAULT_SLICE_KEY: f"sample_{k}"}, index=names),
                var=reference_genes(model),
                shape=(n_cells, schema.n_genes),
            )
            table.obsm[schema.position_key] = to_user(model, position.cpu().numpy())
            store_expression(table, decode_draw(model, expression.cpu().numpy()), schema)
            if schema.library_size is not None:
                table.obs[_keys.LIBRARY_SIZE] = np.full(n_cells, schema.library_size)
            tables.append(table)
    return stack_draws(tables, schema.slice_key or DEFAULT_SLICE_KEY)


def _expression_in(
    model: AlphaSTomics,
    position: Tensor,
    config: SamplerConfig,
    generator: torch.Generator,
    on_step: Callable[[], None],
    *,
    sequence: Tensor | None,
) -> Tensor:
    """Draw expression (N, G) for the positions (N, D) of a draw, in the canonical frame.

    The expression that was drawn with them belongs to them as well, but not to its neighbours: while it was drawn it was
    not yet known which cells these would be.
    """
    chain = SliceExpression(
        model.module,
        model.diffusion,
        position,
        max_context=config.max_context,
        crowding=torch.from_numpy(crowding(position.cpu().numpy())).to(position.device),
        t_pos=place_time(model),
        dependence=model.dependence_,
        sequence=sequence,
    )
    return chain.sample(config, generator, on_step=on_step)
