r"""The reverse chain of expression over a slice whose positions are known.

The network sees all cells of the slice, up to ``max_context``; a larger slice is split into contexts that share anchors,
and the estimates of an anchor are averaged over contexts at every step, as in :mod:`alphastomics.sampling._position`.

Known values, of whole cells or of some genes, are given to the network clean and marked at every step.
What whole known cells tell of the others beyond that, see :mod:`alphastomics.sampling._posterior`, and what alike cells of the
reference tell of the unknown genes of a cell, see :mod:`alphastomics.sampling._exemplars`, moves the mean by :math:`\delta`.
In a Gaussian tissue of unit variance that is

.. math:: \hat x_0 = f(z_t, t) + \frac{\sigma_t^2}{\alpha_t^2 + \sigma_t^2}\, \delta:

all of it where nothing is seen, and nothing where the noisy value itself already tells.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from alphastomics.diffusion import make_step, run_sampler
from alphastomics.nn import nearest_neighbors
from alphastomics.sampling._dependence import N_NEIGHBORS, Surroundings
from alphastomics.sampling._position import split_contexts
from alphastomics.sampling._posterior import krige

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.diffusion import DiffusionConfig
    from alphastomics.nn import Denoiser
    from alphastomics.sampling._dependence import Dependence
    from alphastomics.sampling._exemplars import Exemplars
    from alphastomics.sampling._position import SamplerConfig

N_FOLDS = 5  # of the known cells, for what the network makes of each without it
LEFT_OUT = 0.2  # of the known values of cells that are known in part, for what exemplars add


class ExpressionSampler:
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
    local_density
        How crowded the surroundings of each cell are (N, K); None when it is not known.
    t_pos
        Clock of the positions.
    dependence
        What the noise of neighbors has in common; None for nothing.
    exemplars
        Cells of the reference, for what they tell of cells that are known in part; None for nothing.
    sequence
        Index of the cells in their order (N,); None when the network reads none.

    Attributes
    ----------
    error
        Mean squared residual of each cell that is known as a whole (n,), in the order of the cells.
    """

    def __init__(
        self,
        module: Denoiser,
        diffusion: DiffusionConfig,
        position: Tensor,
        *,
        max_context: int,
        known: Tensor | None = None,
        local_density: Tensor | None = None,
        t_pos: float = 0.0,
        dependence: Dependence | None = None,
        exemplars: Exemplars | None = None,
        sequence: Tensor | None = None,
    ) -> None:
        self.module, self.process = module, diffusion.expression
        self.position, self.t_pos, self.dependence = position[None], t_pos, dependence
        self.exemplars = exemplars
        self.local_density = None if local_density is None else local_density[None]
        self.sequence = None if sequence is None else sequence[None]
        self.contexts = split_contexts(len(position), max_context, position.device)
        self.known = None if known is None else known.isfinite()[None]
        self.value = None if known is None else known.nan_to_num()[None]
        self.error = position.new_zeros(0)
        self.shift = self._shift()

    def estimate(self, z: Tensor, t: Tensor) -> Tensor:
        """Estimate of the clean expression (1, N, G)."""
        x_0 = self._estimate(z, t, self.known)
        if self.shift is None:
            return x_0
        alpha, sigma = self.process.coefficients(t, z)
        return x_0 + sigma**2 / (alpha**2 + sigma**2) * self.shift

    def _estimate(self, z: Tensor, t: Tensor, known: Tensor | None) -> Tensor:
        """What the network says (1, N, G), averaged over contexts."""
        t_pos = torch.full_like(t, self.t_pos)
        total, count = torch.zeros_like(z), z.new_zeros(1, z.shape[1], 1)
        for cells, _ in self.contexts:
            observed = None if known is None else known[:, cells]
            local_density = None if self.local_density is None else self.local_density[:, cells]
            sequence = None if self.sequence is None else self.sequence[:, cells]
            z_cells, x = z[:, cells], self.position[:, cells]
            output = self.module(
                z_cells,
                x,
                t,
                t_pos,
                observed=observed,
                local_density=local_density,
                predict=("expression",),
                sequence=sequence,
            ).expression
            assert output is not None  # it was asked for
            total[:, cells] += self.process.x0(output.float(), z_cells, t)
            count[:, cells] += 1
        return total / count

    def mean(self, local_density: Tensor, position: Tensor) -> Tensor:
        """Conditional mean (N, G) of the expression, the first step of every chain, for another view of the slice.

        Parameters
        ----------
        local density, position
            Crowding (N, K) and positions (N, D) that take the place of the slice's own.
        """
        own = self.local_density, self.position
        self.local_density, self.position = local_density[None], position[None]
        try:
            return self._first_estimate()
        finally:
            self.local_density, self.position = own

    @cached_property
    def surroundings(self) -> Surroundings:
        """Neighbors of the cells, and the conditional mean of their expression in the slice as it is."""
        near = nearest_neighbors(self.position[0].cpu(), N_NEIGHBORS)
        return Surroundings.of(near, self._first_estimate().cpu())

    @torch.no_grad()
    def _first_estimate(self) -> Tensor:
        """Estimate (N, G) where nothing but the known values is seen."""
        one = self.position.new_ones(1)
        z = self.position.new_zeros(1, self.position.shape[1], self.module.config.n_genes)
        if self.known is None or self.value is None:
            return self.estimate(z, one)[0]
        x_0 = self.estimate(torch.where(self.known, self.value, z), one)
        return torch.where(self.known, self.value, x_0)[0]

    @torch.no_grad()
    def left_out(self) -> tuple[Tensor, Tensor]:
        """Numbers (n,) of the cells known as a whole, and their mean (n, G) given those of the other folds only."""
        assert self.known is not None
        assert self.value is not None
        whole = self.known[0].all(-1).nonzero()[:, 0]
        mean = self.value.new_zeros(len(whole), self.value.shape[2])
        one = self.value.new_ones(1)
        for fold in range(min(N_FOLDS, len(whole))):
            known = self.known.clone()
            known[:, whole[fold::N_FOLDS]] = False
            x_0 = self._estimate(torch.where(known, self.value, 0.0), one, known)
            mean[fold::N_FOLDS] = x_0[0, whole[fold::N_FOLDS]]
        return whole, mean

    @torch.no_grad()
    def _shift(self) -> Tensor | None:
        """What known values say beyond the network, (1, N, G)."""
        if self.known is None or self.value is None:
            return None
        whole, mean = self.left_out()
        residual = self.value[0, whole] - mean
        self.error = residual.square().mean(dim=1)
        return (krige(self.position[0], whole, residual) + self._retrieved())[None]

    def _retrieved(self) -> Tensor:
        """What alike exemplars say of cells that are known in part, (N, G)."""
        assert self.known is not None
        assert self.value is not None
        known, value = self.known[0], self.value[0]
        shift = torch.zeros_like(value)
        part = known.any(-1) & ~known.all(-1)
        if self.exemplars is None or not bool(part.any()):
            return shift
        left = torch.rand(known.shape, generator=torch.Generator().manual_seed(0)).to(value.device) < LEFT_OUT
        left &= known & part[:, None]
        difference, mean = self._difference(known & ~left, part)
        seen, residual = left[part], value[part] - mean
        power = difference[seen].square().sum().clamp_min(1e-12)
        share = ((difference * residual)[seen].sum() / power).clamp(0, 1)
        shift[part] = share * self._difference(known, part)[0]
        return shift

    def _difference(self, known: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of the exemplars that are alike to the cells ``part`` (N,) minus that of the network, and the latter."""
        assert self.exemplars is not None
        assert self.value is not None
        value = torch.where(known, self.value[0], 0.0)
        mean = self._estimate(value[None], value.new_ones(1), known[None])[0, part]
        alike = self.exemplars.alike(value[part].cpu().numpy(), known[part].cpu().numpy())
        return torch.from_numpy(alike).to(mean) - mean, mean

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
        dependence = self.dependence

        def noise() -> Tensor:
            if dependence is None:
                drawn = torch.randn(shape, generator=generator)
            else:
                drawn = dependence.noise(self.surroundings, generator)[None]
            return sign * drawn.to(self.position.device)

        def denoise(z: Tensor, t: Tensor) -> Tensor:
            if self.known is None or self.value is None:
                return self.estimate(z, t)
            z[:] = torch.where(self.known, self.value, z)
            return torch.where(self.known, self.value, self.estimate(z, t))

        step = make_step(config.sampler or "dpm++2m", self.process, eta=config.eta)
        return run_sampler(denoise, step, noise, n_steps=config.n_steps, on_step=on_step)[0]
