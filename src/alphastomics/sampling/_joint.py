"""Sampling of expression and positions together: new slices.

Both timesteps run from 1 to 0 at the same time. Positions are in the canonical frame throughout, so that contexts of a slice
larger than ``max_context`` need no alignment: their estimates are averaged for the cells that they share. The timestep of
positions is at least the smallest one of training. Afterwards the positions are transported to an outline, and overlaps are
removed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import torch

from alphastomics import _keys
from alphastomics.data import local_density
from alphastomics.data._slices import DEFAULT_SLICE_KEY
from alphastomics.diffusion import make_step, run_joint_sampler
from alphastomics.diffusion.geometry import center
from alphastomics.sampling._cells import split_contexts
from alphastomics.sampling._draws import draw_generator, progress_bar, stack_draws, store_expression
from alphastomics.sampling._expression import ExpressionSampler
from alphastomics.sampling._overlap import remove_overlaps

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from torch import Tensor

    from alphastomics.config import SamplingConfig
    from alphastomics.sampling._sampler import Sampler

logger = logging.getLogger(__name__)

OVERLAPS = 3  # key of generators


class JointSampler:
    """Samples a slice, given its number of cells.

    Parameters
    ----------
    sampler
        The trained network and what belongs to it.
    n_cells
        Number of cells N.
    max_context
        Largest number of cells that attend to each other.

    Attributes
    ----------
    sequence
        Index of the cells in their order (N,), if the network reads one: that of their rows.
    """

    def __init__(self, sampler: Sampler, n_cells: int, *, max_context: int) -> None:
        self.module, self.diffusion, self.n_cells = sampler.module, sampler.diffusion, n_cells
        self.shared_frame, self.smallest = sampler.shared_frame, sampler.smallest_time
        self.contexts = split_contexts(n_cells, max_context, sampler.device)
        self.sequence: Tensor | None = None
        if self.module.config.reads_sequence:
            self.sequence = torch.arange(n_cells, dtype=torch.float32, device=sampler.device)

    def _estimate(self, z_expr: Tensor, z_pos: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Estimates of the clean expression (1, N, G) and positions (1, N, D) by the network."""
        expression, position = torch.zeros_like(z_expr), torch.zeros_like(z_pos)
        count = z_pos.new_zeros(1, self.n_cells, 1)
        t_pos = t.clamp_min(self.smallest)
        for cells, _ in self.contexts:
            sequence = None if self.sequence is None else self.sequence[cells][None]
            output = self.module(z_expr[:, cells], z_pos[:, cells], t, t_pos, sequence=sequence)
            expression[:, cells] += self.diffusion.expression.x0(output.expression.float(), z_expr[:, cells], t)
            x_pos = self.diffusion.position.x0(output.position.float(), z_pos[:, cells], t_pos)
            position[:, cells] += x_pos
            count[:, cells] += 1
        position = position / count
        return expression / count, position if self.shared_frame else center(position)

    @torch.no_grad()
    def sample(
        self, config: SamplingConfig, generator: torch.Generator, on_step: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw expression (N, G) in network units and positions (N, D) in the canonical frame."""
        n_genes, n_dims = self.module.config.n_genes, self.module.config.n_dims
        device = self.module.device

        def noise_expr() -> Tensor:
            return torch.randn(1, self.n_cells, n_genes, generator=generator).to(device)

        def noise_pos() -> Tensor:
            epsilon = torch.randn(1, self.n_cells, n_dims, generator=generator).to(device)
            return epsilon if self.shared_frame else center(epsilon)

        def denoise(z: tuple[Tensor, ...], t: Tensor) -> tuple[Tensor, ...]:
            z_expr, z_pos = z
            return self._estimate(z_expr, z_pos, t)

        steps = tuple(
            make_step(config.sampler, p, eta=config.eta) for p in (self.diffusion.expression, self.diffusion.position)
        )
        x_expr, x_pos = run_joint_sampler(
            denoise, steps, (noise_expr, noise_pos), n_steps=config.n_steps, on_step=on_step
        )
        return x_expr[0], x_pos[0]


def sample_tissue(sampler: Sampler, var: pd.DataFrame, config: SamplingConfig) -> AnnData:
    """Sample whole slices; see :meth:`AlphaSTomics.sample`. ``var`` describes the genes of the result."""
    schema, n_cells, n_samples = sampler.schema, config.n_cells, config.n_samples
    outlines, nearest = sampler.fitted.outlines, sampler.fitted.nearest
    assert outlines is not None
    assert nearest is not None
    assert n_cells is not None  # required for this mode
    joint = JointSampler(sampler, n_cells, max_context=config.max_context)
    logger.info("Sampling %d slices of %d cells in %d steps on %s.", n_samples, n_cells, config.n_steps, sampler.device)
    tables, names, slice_key = [], [f"cell_{i}" for i in range(n_cells)], schema.slice_key or DEFAULT_SLICE_KEY
    total = 2 * n_samples * config.n_steps
    with progress_bar(total, "Sampling tissue") as bar:
        for k in range(n_samples):
            generator = draw_generator(config.random_state, k)
            _, position = joint.sample(config, generator, lambda: bar.update())
            number = int(torch.randint(len(outlines.quantiles), (), generator=generator))
            moved = outlines.apply(position.cpu().numpy(), number).astype(np.float64)
            rng = np.random.default_rng([config.random_state, OVERLAPS, k])
            position = torch.from_numpy(remove_overlaps(moved, nearest, rng)).to(position)
            expression = _expression_at(
                sampler, position, config, generator, lambda: bar.update(), sequence=joint.sequence
            )
            obs = pd.DataFrame({slice_key: f"sample_{k}"}, index=names)
            table = ad.AnnData(obs=obs, var=var, shape=(n_cells, schema.n_genes))
            table.obsm[schema.position_key] = sampler.to_user(position.cpu().numpy())
            store_expression(table, sampler.decode_draw(expression.cpu().numpy()), schema)
            if schema.library_size is not None:
                table.obs[_keys.LIBRARY_SIZE] = np.full(n_cells, schema.library_size)
            tables.append(table)
    return stack_draws(tables, slice_key)


def _expression_at(
    sampler: Sampler,
    position: Tensor,
    config: SamplingConfig,
    generator: torch.Generator,
    on_step: Callable[[], None],
    *,
    sequence: Tensor | None,
) -> Tensor:
    """Draw expression (N, G) for sampled positions (N, D) in the canonical frame.

    Expression sampled together with positions depends on noisy positions of the neighbors, so it is sampled again.
    """
    expression = ExpressionSampler(
        sampler,
        position,
        max_context=config.max_context,
        local_density=torch.from_numpy(local_density(position.cpu().numpy())).to(position.device),
        sequence=sequence,
    )
    return expression.sample(config, generator, on_step=on_step)
