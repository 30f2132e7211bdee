"""The reverse chain of expression and position together: a new slice.

Both timesteps run from 1 to 0 at the same time. Positions are in the canonical frame throughout, so that contexts of a slice
beyond ``max_context`` need no alignment: their estimates are averaged where they share cells. The timestep of the positions is
shown to the network no further than it was trained; how cells are packed is decided last, once they lie in an outline.

New slices as an AnnData.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import pandas as pd
import torch
from scvi import settings
from tqdm.auto import tqdm

from alphastomics import _keys
from alphastomics.data import local_density
from alphastomics.data._slices import DEFAULT_SLICE_KEY
from alphastomics.diffusion import make_step, run_joint_sampler, smallest_time
from alphastomics.diffusion.geometry import center
from alphastomics.nn import nearest_neighbors
from alphastomics.sampling._calibration import place_time
from alphastomics.sampling._draws import check_draws, draw_generator, stack_draws
from alphastomics.sampling._expression import ExpressionSampler
from alphastomics.sampling._place import to_user
from alphastomics.sampling._position import split_contexts
from alphastomics.sampling._predict import decode_draw, reference_genes, store_expression

if TYPE_CHECKING:
    from collections.abc import Callable

    from anndata import AnnData
    from torch import Tensor

    from alphastomics.diffusion import DiffusionConfig
    from alphastomics.model._model import AlphaSTomics
    from alphastomics.nn import Denoiser
    from alphastomics.sampling._position import SamplerConfig

LOOSEST, FINEST, PACKING_STEPS = 2.0, 0.05, 12  # noise in spacings


class JointSampler:
    """A slice of which nothing is known but its number of cells.

    Parameters
    ----------
    module, diffusion
        The trained network and its processes.
    n_cells
        Number of cells N.
    shared_frame
        Whether positions are registered.
    spacing
        Distance between neighboring cells in model units.
    max_context
        Largest number of cells that attend to each other.

    Attributes
    ----------
    sequence
        Index of the cells in their order (N,), where the network reads one: that of their rows.
    """

    def __init__(
        self,
        module: Denoiser,
        diffusion: DiffusionConfig,
        n_cells: int,
        *,
        shared_frame: bool,
        spacing: float,
        max_context: int,
    ) -> None:
        self.module, self.diffusion, self.shared_frame, self.spacing = module, diffusion, shared_frame, spacing
        self.n_cells = n_cells
        self.contexts = split_contexts(n_cells, max_context, module.device)
        self.smallest = smallest_time(diffusion.position.schedule, spacing)
        self.sequence: Tensor | None = None
        if module.config.reads_sequence:
            self.sequence = torch.arange(n_cells, dtype=torch.float32, device=module.device)

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
    def packed(self, position: Tensor, generator: torch.Generator) -> Tensor:
        r"""Pack cells (N, D) whose places are right but for a few spacings.

        .. math:: z_s = \hat x + \frac{s^2}{r^2} (z_r - \hat x) + s \sqrt{1 - s^2 / r^2}\; \varepsilon

        from noise r to noise s < r: the reverse chain of positions with packing as the only denoiser.
        """
        min_distance = self.module.min_distance
        if not self.spacing or self.n_cells < 2:
            return position
        z = position / self.spacing
        levels = torch.logspace(math.log10(LOOSEST), math.log10(FINEST), PACKING_STEPS).to(z)

        def noise() -> Tensor:
            return torch.randn(z.shape, generator=generator).to(z)

        z = z + LOOSEST * noise()
        for r, s in zip(levels[:-1], levels[1:], strict=True):
            x = min_distance(z, r, nearest_neighbors(z, min_distance.n_neighbors))
            z = x + (s / r) ** 2 * (z - x) + s * (1 - (s / r) ** 2).sqrt() * noise()
        return min_distance(z, levels[-1], nearest_neighbors(z, min_distance.n_neighbors)) * self.spacing

    @torch.no_grad()
    def sample(
        self, config: SamplerConfig, generator: torch.Generator, on_step: Callable[[], None] | None = None
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
            make_step(config.sampler or "dpm++2m", p, eta=config.eta)
            for p in (self.diffusion.expression, self.diffusion.position)
        )
        x_expr, x_pos = run_joint_sampler(
            denoise, steps, (noise_expr, noise_pos), n_steps=config.n_steps, on_step=on_step
        )
        return x_expr[0], x_pos[0]


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
    tissue = JointSampler(
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

    The expression that was drawn with them belongs to them as well, but not to its neighbors: while it was drawn it was
    not yet known which cells these would be.
    """
    chain = ExpressionSampler(
        model.module,
        model.diffusion,
        position,
        max_context=config.max_context,
        local_density=torch.from_numpy(local_density(position.cpu().numpy())).to(position.device),
        t_pos=place_time(model),
        dependence=model.dependence_,
        sequence=sequence,
    )
    return chain.sample(config, generator, on_step=on_step)
