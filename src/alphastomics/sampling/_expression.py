r"""Sampling of expression, given positions.

The cells of a slice are one context, up to ``max_context``; a larger slice is split at random into contexts that share anchors, and
the estimates of an anchor are averaged over contexts at every step, as in :mod:`alphastomics.sampling._position`.

Observed values, of whole cells or of some genes, are clean inputs of the network at every step, marked as observed. They also
correct its conditional mean by :math:`\delta`, see :mod:`alphastomics.sampling._completion`. For Gaussian expression of unit
variance the estimate is then

.. math:: \hat x_0 = f(z_t, t) + \frac{\sigma_t^2}{\alpha_t^2 + \sigma_t^2}\, \delta,

with the whole correction at pure noise, and none without noise.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from alphastomics.diffusion import make_step, run_sampler
from alphastomics.nn import nearest_neighbors
from alphastomics.sampling._calibration import N_NEIGHBORS, Neighborhood
from alphastomics.sampling._cells import random_contexts
from alphastomics.sampling._completion import krige

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.config import SamplingConfig
    from alphastomics.diffusion import Start
    from alphastomics.sampling._sampler import Sampler

N_FOLDS = 5  # of the complete cells, for the prediction of each from the others
LEFT_OUT = 0.2  # of the observed values of incomplete cells, to weigh the exemplars


class ExpressionSampler:
    """Samples the expression of the cells of one slice, given their positions.

    Parameters
    ----------
    sampler
        The trained network and what belongs to it.
    position
        Positions (N, D) in the canonical frame, model units.
    max_context
        Largest number of cells that attend to each other.
    observed
        Observed expression (N, G) in network units, NaN elsewhere; None if nothing is observed.
    local_density
        Local density of the cells (N, K); None leaves it out.
    sequence
        Index of the cells in their order (N,); None if the network reads none.

    Attributes
    ----------
    dependence
        Correlation of the noise of neighbors; None for independent noise.
    error
        Mean squared residual of each complete cell (n,), one with all genes observed, in the order of the cells.
    """

    def __init__(
        self,
        sampler: Sampler,
        position: Tensor,
        *,
        max_context: int,
        observed: Tensor | None = None,
        local_density: Tensor | None = None,
        sequence: Tensor | None = None,
    ) -> None:
        self.module, self.process = sampler.module, sampler.diffusion
        reference_cells = sampler.fitted.reference_cells
        self.dependence = sampler.fitted.dependence
        self.exemplars = None if reference_cells is None else reference_cells.exemplars
        self.position = position[None]
        self.local_density = None if local_density is None else local_density[None]
        self.sequence = None if sequence is None else sequence[None]
        self.contexts = random_contexts(len(position), max_context, position.device)
        self.observed = None if observed is None else observed.isfinite()[None]
        self.value = None if observed is None else observed.nan_to_num()[None]
        self.error = position.new_zeros(0)
        self.shift = self._shift()

    def estimate(self, z: Tensor, t: Tensor) -> Tensor:
        """Estimate of the clean expression (1, N, G)."""
        x_0 = self._estimate(z, t, self.observed)
        if self.shift is None:
            return x_0
        alpha, sigma = self.process.coefficients(t, z)
        return x_0 + sigma**2 / (alpha**2 + sigma**2) * self.shift

    def _estimate(self, z: Tensor, t: Tensor, observed: Tensor | None) -> Tensor:
        """Estimate of the network (1, N, G), averaged over contexts."""
        t_pos = torch.zeros_like(t)
        total, count = torch.zeros_like(z), z.new_zeros(1, z.shape[1], 1)
        for cells in self.contexts:
            local_density = None if self.local_density is None else self.local_density[:, cells]
            sequence = None if self.sequence is None else self.sequence[:, cells]
            z_cells, x = z[:, cells], self.position[:, cells]
            output = self.module(
                z_cells,
                x,
                t,
                t_pos,
                observed=None if observed is None else observed[:, cells],
                local_density=local_density,
                predict=("expression",),
                sequence=sequence,
            ).expression
            assert output is not None  # in ``predict``
            total[:, cells] += self.process.x0(output.float(), z_cells, t)
            count[:, cells] += 1
        return total / count

    def mean(self, local_density: Tensor, position: Tensor) -> Tensor:
        """Conditional mean (N, G) of the expression for another view of the slice.

        Parameters
        ----------
        local_density, position
            Local density (N, K) and positions (N, D) that replace those of the slice.
        """
        original = self.local_density, self.position
        self.local_density, self.position = local_density[None], position[None]
        try:
            return self._first_estimate()
        finally:
            self.local_density, self.position = original

    @cached_property
    def neighborhood(self) -> Neighborhood:
        """Neighbors of the cells, and the conditional mean of their expression in the slice as it is."""
        neighbors = nearest_neighbors(self.position[0].cpu(), N_NEIGHBORS)
        return Neighborhood.from_neighbors(neighbors, self._first_estimate().cpu())

    @torch.no_grad()
    def _first_estimate(self) -> Tensor:
        """Estimate (N, G) from the observed values alone."""
        one = self.position.new_ones(1)
        z = self.position.new_zeros(1, self.position.shape[1], self.module.config.n_genes)
        if self.observed is None or self.value is None:
            return self.estimate(z, one)[0]
        x_0 = self.estimate(torch.where(self.observed, self.value, z), one)
        return torch.where(self.observed, self.value, x_0)[0]

    @torch.no_grad()
    def left_out(self) -> tuple[Tensor, Tensor]:
        """Indices (n,) of the complete cells, and their mean (n, G) given the other folds only."""
        assert self.observed is not None
        assert self.value is not None
        complete = self.observed[0].all(-1).nonzero()[:, 0]
        mean = self.value.new_zeros(len(complete), self.value.shape[2])
        one = self.value.new_ones(1)
        for fold in range(min(N_FOLDS, len(complete))):
            observed = self.observed.clone()
            observed[:, complete[fold::N_FOLDS]] = False
            x_0 = self._estimate(torch.where(observed, self.value, 0.0), one, observed)
            mean[fold::N_FOLDS] = x_0[0, complete[fold::N_FOLDS]]
        return complete, mean

    @torch.no_grad()
    def _shift(self) -> Tensor | None:
        """Correction of the conditional mean by observed values, (1, N, G)."""
        if self.observed is None or self.value is None:
            return None
        complete, mean = self.left_out()
        residual = self.value[0, complete] - mean
        self.error = residual.square().mean(dim=1)
        return (krige(self.position[0], complete, residual) + self._exemplar_shift())[None]

    def _exemplar_shift(self) -> Tensor:
        """Correction (N, G) by similar exemplars, for cells of which some genes are observed."""
        assert self.observed is not None
        assert self.value is not None
        observed, value = self.observed[0], self.value[0]
        shift = torch.zeros_like(value)
        rows = observed.any(-1) & ~observed.all(-1)
        if self.exemplars is None or not bool(rows.any()):
            return shift
        left_out = torch.rand(observed.shape, generator=torch.Generator().manual_seed(0)).to(value.device) < LEFT_OUT
        left_out &= observed & rows[:, None]
        difference, mean = self._difference(observed & ~left_out, rows)
        scored, residual = left_out[rows], value[rows] - mean
        power = difference[scored].square().sum().clamp_min(1e-12)
        share = ((difference * residual)[scored].sum() / power).clamp(0, 1)
        shift[rows] = share * self._difference(observed, rows)[0]
        return shift

    def _difference(self, observed: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of the exemplars similar to the cells ``rows`` (N,) minus that of the network, and the latter."""
        assert self.exemplars is not None
        assert self.value is not None
        value = torch.where(observed, self.value[0], 0.0)
        mean = self._estimate(value[None], value.new_ones(1), observed[None])[0, rows]
        similar = self.exemplars.nearest_mean(value[rows].cpu().numpy(), observed[rows].cpu().numpy())
        return torch.from_numpy(similar).to(mean) - mean, mean

    @torch.no_grad()
    def sample(
        self,
        config: SamplingConfig,
        generator: torch.Generator,
        *,
        start: Start | None = None,
        on_step: Callable[[], None] | None = None,
    ) -> Tensor:
        """Draw expression (N, G) in network units, from pure noise or from ``start``."""
        shape = (1, self.position.shape[1], self.module.config.n_genes)
        dependence = self.dependence

        def noise() -> Tensor:
            if dependence is None:
                epsilon = torch.randn(shape, generator=generator)
            else:
                epsilon = dependence.noise(self.neighborhood, generator)[None]
            return epsilon.to(self.position.device)

        def denoise(z: Tensor, t: Tensor) -> Tensor:
            if self.observed is None or self.value is None:
                return self.estimate(z, t)
            z[:] = torch.where(self.observed, self.value, z)
            return torch.where(self.observed, self.value, self.estimate(z, t))

        step = make_step(config.sampler, self.process, eta=config.eta)
        return run_sampler(denoise, step, noise, n_steps=config.n_steps, start=start, on_step=on_step)[0]
