"""The reverse chain of expression over a slice whose positions are known.

The network sees all cells of the slice, up to ``max_context``; a larger slice is split into contexts that share anchors,
and the estimates of an anchor are averaged over contexts at every step, as in :mod:`alphastomics.model._position_chain`.

Known values, of whole cells or of some genes, are given to the network clean and marked at every step, as in training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from alphastomics.diffusion import make_step, run_chain
from alphastomics.model._position_chain import split_contexts

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.model._position_chain import SamplerConfig
    from alphastomics.nn import Denoiser
    from alphastomics.train import DiffusionConfig


class SliceExpression:
    """The expression of the cells of one slice, given their positions.

    Parameters
    ----------
    module, diffusion
        The trained network and its processes.
    position
        Positions (N, D) in the canonical frame, model units.
    max_context
        Largest number of cells that attend to each other.
    known
        Known expression (N, G) in network units, NaN where unknown; None when nothing is known.
    crowding
        How crowded the surroundings of each cell are (N, K); None when it is not known.
    """

    def __init__(
        self,
        module: Denoiser,
        diffusion: DiffusionConfig,
        position: Tensor,
        *,
        max_context: int,
        known: Tensor | None = None,
        crowding: Tensor | None = None,
    ) -> None:
        self.module, self.process = module, diffusion.expression
        self.position = position[None]
        self.crowding = None if crowding is None else crowding[None]
        self.contexts = split_contexts(len(position), max_context, position.device)
        self.known = None if known is None else known.isfinite()[None]
        self.value = None if known is None else known.nan_to_num()[None]

    def estimate(self, z: Tensor, t: Tensor) -> Tensor:
        """Estimate of the clean expression (1, N, G)."""
        zero = torch.zeros_like(t)
        total, count = torch.zeros_like(z), z.new_zeros(1, z.shape[1], 1)
        for cells, _ in self.contexts:
            held = None if self.known is None else self.known[:, cells]
            crowding = None if self.crowding is None else self.crowding[:, cells]
            z_cells, x = z[:, cells], self.position[:, cells]
            output = self.module(z_cells, x, t, zero, held=held, crowding=crowding, predict=("expression",)).expression
            assert output is not None  # it was asked for
            total[:, cells] += self.process.x0(output.float(), z_cells, t)
            count[:, cells] += 1
        return total / count

    @torch.no_grad()
    def sample(
        self,
        config: SamplerConfig,
        generator: torch.Generator,
        *,
        mirrored: bool = False,
        on_step: Callable[[], None] | None = None,
    ) -> Tensor:
        """Draw expression (N, G) in network units; ``mirrored`` turns the sign of all noise.

        The draw and its mirror image are both samples. Their mean is nearer to the conditional mean than that of two
        independent draws, because the part of the chain that is linear in the noise cancels.
        """
        shape = (1, self.position.shape[1], self.module.config.n_genes)
        sign = -1.0 if mirrored else 1.0

        def noise() -> Tensor:
            return sign * torch.randn(shape, generator=generator).to(self.position.device)

        def denoise(z: Tensor, t: Tensor) -> Tensor:
            if self.known is None or self.value is None:
                return self.estimate(z, t)
            z[:] = torch.where(self.known, self.value, z)
            return torch.where(self.known, self.value, self.estimate(z, t))

        step = make_step(config.sampler or "dpm++2m", self.process, eta=config.eta)
        return run_chain(denoise, step, noise, n_steps=config.n_steps, on_step=on_step)[0]
