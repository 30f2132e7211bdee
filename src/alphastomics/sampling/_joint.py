r"""Draws of new slices: a smoothed bootstrap of the cells of a reference slice, and the reverse process of their expression.

Of a random reference slice, cells :math:`J_1, \dots, J_N` are drawn from those that are stored with the model, without replacement
if there are enough. With their positions r and their expression g,

.. math::

    x_i &= r_{J_i} + h\, \xi_i, & \xi_i &\sim \mathcal N(0, I), \\
    z_{i, t_0} &= \alpha_{t_0} g_{J_i} + \sigma_{t_0} \varepsilon_i, & \varepsilon_i &\sim \mathcal N(0, I).

h is the median nearest-neighbor distance of the stored cells (Silverman 1986, Density Estimation for Statistics and Data
Analysis, ch. 6). Overlapping cells are moved apart, and the reverse process of expression runs from :math:`t_0` to 0, given the
final positions (Meng et al. 2022, arXiv:2108.01073).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import torch
from scipy.spatial import KDTree

from alphastomics import _keys
from alphastomics.data import local_density
from alphastomics.data._plane import insert_column
from alphastomics.diffusion import Start
from alphastomics.sampling._draws import draw_generator, progress_bar, stack_draws, store_expression
from alphastomics.sampling._expression import ExpressionSampler
from alphastomics.sampling._overlap import remove_overlaps

if TYPE_CHECKING:
    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.config import SamplingConfig
    from alphastomics.sampling._reference_cells import ReferenceCells
    from alphastomics.sampling._sampler import Sampler

logger = logging.getLogger(__name__)

# At 1 nothing is left of the expression of the reference cells, and a classifier distinguishes samples from real tissue more easily;
# towards 0 the cells are copied.
START_TIME = 0.7
BOOTSTRAP = 3  # key of generators


def sample_tissue(sampler: Sampler, var: pd.DataFrame, config: SamplingConfig) -> AnnData:
    """Sample whole slices; see :meth:`AlphaSTomics.sample`. ``var`` describes the genes of the result."""
    schema, n_cells, n_samples = sampler.schema, config.n_cells, config.n_samples
    reference, nearest = sampler.fitted.reference_cells, sampler.fitted.nearest
    assert reference is not None
    assert nearest is not None
    assert n_cells is not None  # required for this mode
    logger.info("Sampling %d slices of %d cells in %d steps on %s.", n_samples, n_cells, config.n_steps, sampler.device)
    tables, names, slice_key = [], [f"cell_{i}" for i in range(n_cells)], schema.slice_key or _keys.SLICE
    ordered = sampler.module.config.reads_sequence
    with progress_bar(n_samples * config.n_steps, "Sampling tissue") as bar:
        for k in range(n_samples):
            rng = np.random.default_rng([config.random_state, BOOTSTRAP, k])
            rows, position = draw_cells(reference, n_cells, rng, in_order=ordered)
            position = remove_overlaps(position, nearest, rng)
            expression = ExpressionSampler(
                sampler,
                torch.from_numpy(position).to(sampler.device, torch.float32),
                max_context=config.max_context,
                local_density=torch.from_numpy(local_density(position)).to(sampler.device),
                sequence=torch.from_numpy(reference.sequence[rows]).to(sampler.device) if ordered else None,
            ).sample(
                config,
                draw_generator(config.random_state, k),
                start=Start(torch.from_numpy(reference.expression[rows])[None].to(sampler.device), START_TIME),
                on_step=lambda: bar.update(),
            )
            obs = pd.DataFrame({slice_key: pd.Categorical([f"sample_{k}"] * n_cells)}, index=names)
            table = ad.AnnData(obs=obs, var=var, shape=(n_cells, schema.n_genes))
            table.obsm[schema.position_key] = insert_column(sampler.to_user(position.astype(np.float32)), schema)
            if ordered:
                table.obs[schema.sequence_key] = reference.sequence[rows]
            store_expression(table, sampler.decode_draw(expression.cpu().numpy()), schema)
            if schema.library_size is not None:
                table.obs[_keys.LIBRARY_SIZE] = np.full(n_cells, schema.library_size)
            tables.append(table)
    return stack_draws(tables, slice_key)


def draw_cells(
    reference: ReferenceCells, n_cells: int, rng: np.random.Generator, *, in_order: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Indices (N,) of stored cells of a random slice, ``in_order`` by their sequence, and positions (N, D) near them."""
    stored = np.flatnonzero(reference.slice == rng.choice(np.unique(reference.slice)))
    rows = rng.choice(stored, n_cells, replace=n_cells > len(stored))
    rows = rows[np.lexsort((rows, reference.sequence[rows]))] if in_order else rows
    position = reference.position.astype(np.float64)
    noise = spacing(position[stored]) * rng.standard_normal((n_cells, position.shape[1]))
    return rows, position[rows] + noise


def spacing(position: NDArray[np.float64]) -> float:
    """Median nearest-neighbor distance of positions (n, D); 0 for a single cell."""
    return float(np.median(KDTree(position).query(position, 2)[0][:, 1])) if len(position) > 1 else 0.0
