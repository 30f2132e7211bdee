r"""Sampling of positions, given expression.

All cells of a slice attend to each other. A slice larger than ``max_context`` is split into contexts that share the same
anchor cells,

.. math::

    \hat x_0^{(b)} = f(z_{A \cup B_b}), \qquad
    \hat x_0 \leftarrow \hat x_0^{(b)} R_b + \delta_b, \quad
    (R_b, \delta_b) = \arg\min \lVert \hat x^{(b)}_{0,A} R + \delta - \hat x^{(1)}_{0,A} \rVert^2,

and the estimates of the anchors are averaged over contexts, at every step of the reverse process: one joint sample, without
seams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from alphastomics.diffusion import REFINEMENT_NOISE, make_step, run_sampler
from alphastomics.diffusion.geometry import align, center, kabsch
from alphastomics.sampling._cells import embed_cells
from alphastomics.sampling._layout import refine_layout
from alphastomics.sampling._posterior import GaussianPosterior, estimate_posterior

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.config import SamplingConfig
    from alphastomics.data import CellSource
    from alphastomics.nn import Prediction
    from alphastomics.sampling._cells import EncodedCells
    from alphastomics.sampling._sampler import Sampler

VIEW_DROPOUT = 0.2  # share of the genes that a view leaves out
VIEW_CONTEXT = 1024  # cells of a view that attend to each other


class PositionSampler:
    """Samples the positions of one slice, given the expression of its cells.

    Parameters
    ----------
    sampler
        The trained network and what belongs to it.
    cells
        The cells, N of them.

    Attributes
    ----------
    mean
        Conditional mean (1, N, D) in the canonical frame, with which sampling starts.
    """

    def __init__(self, sampler: Sampler, cells: EncodedCells) -> None:
        self.module, self.process = sampler.module, sampler.diffusion.position
        self.shared_frame, self.spacing = sampler.shared_frame, sampler.spacing
        self.embedding, self.contexts, self.sequence = cells
        self.n_dims = self.module.config.n_dims
        start = self.embedding.new_zeros(1, len(self.embedding), self.n_dims)
        self.mean = self._estimate(start, self.embedding.new_ones(1))
        self.observed: Tensor | None = None

    def observe(self, position: Tensor) -> None:
        """Fix positions (N, D), in the frame of the user and model units, NaN where they are not observed.

        They are brought to the canonical frame. In a free frame the conditional mean determines the rotation only.
        """
        self.observed = position.isfinite().all(-1)
        x, y = position[self.observed], self.mean[0, self.observed]
        self.offset = x.mean(0)
        self.rotation = torch.eye(self.n_dims, device=x.device)
        self.shift = torch.zeros_like(self.offset) if not self.shared_frame else self.offset
        if not self.shared_frame:
            self.rotation = kabsch((x - self.offset)[None], (y - y.mean(0))[None])[0]
            self.shift = y.mean(0)
        self.value = (x - self.offset) @ self.rotation + self.shift

    def to_user_frame(self, x: Tensor) -> Tensor:
        """Positions (N, D) of the canonical frame in the frame of the observed cells."""
        return (x - self.shift) @ self.rotation.T + self.offset

    @torch.no_grad()
    def average_views(
        self, source: CellSource, rows: NDArray[np.int64], config: SamplingConfig, rng: np.random.Generator
    ) -> None:
        """Replace the conditional mean by its average over views, as a network trained with dropout is averaged.

        A view leaves out a random fifth of the genes and divides the slice at random into contexts; each context is
        placed on its own and rotated onto the mean of the slice.
        """
        n, slice_mean = len(rows), self.mean
        total = torch.zeros_like(slice_mean)
        one = self.embedding.new_ones(1)
        n_contexts = max(1, round(n / VIEW_CONTEXT), -(-n // config.max_context))
        for _ in range(config.n_views):
            genes = rng.random(source.schema.n_genes) >= VIEW_DROPOUT
            if not (genes & source.measured).any():  # possible with very few genes
                genes = source.measured
            embedding = embed_cells(self.module, source, rows, genes)
            for cells in torch.from_numpy(rng.permutation(n)).tensor_split(n_contexts):
                start = slice_mean.new_zeros(1, len(cells), self.n_dims)
                h = embedding[cells][None] + self.module.position_missing
                output = self._trunk(h, one, cells, ("position",)).position
                assert output is not None  # in ``predict``
                x_0 = self.process.x0(output.float(), start, one)
                total[:, cells] += x_0 if self.shared_frame else align(x_0, slice_mean[:, cells])
        self.mean = total / config.n_views

    @torch.no_grad()
    def refine(self, generator: torch.Generator) -> None:
        """Move the cells of the conditional mean towards those that resemble them in the neighborhood embedding."""
        one = self.embedding.new_ones(1)
        feature = self.embedding.new_zeros(len(self.embedding), self.module.config.n_latent)
        for cells, _ in self.contexts:
            h = self.embedding[cells][None] + self.module.position_missing
            latent = self._trunk(h, one, cells, ()).latent
            feature[cells] = F.normalize(self.module.neighborhood(latent)[0].float(), dim=-1)
        self.mean = refine_layout(self.mean[0], feature, generator)[None]

    def _trunk(
        self, h: Tensor, t: Tensor, cells: Tensor, predict: tuple[str, ...], position: Tensor | None = None
    ) -> Prediction:
        """Run the blocks on embeddings ``h`` (1, n, d) of some cells, with their noisy positions, if there are any."""
        sequence = None if self.sequence is None else self.sequence[cells][None]
        return self.module.trunk(h, torch.zeros_like(t), t, None, predict, position=position, sequence=sequence)

    @torch.no_grad()
    def _estimate(self, z: Tensor, t: Tensor) -> Tensor:
        """Estimate of the clean positions (1, N, D)."""
        total = torch.zeros_like(z)
        count = z.new_zeros(1, z.shape[1], 1)
        reference: Tensor | None = None
        for cells, n_anchors in self.contexts:
            h = self.embedding[cells][None] + self.module.embed_position(z[:, cells], t)
            output = self._trunk(h, t, cells, ("position",), z[:, cells]).position
            assert output is not None  # in ``predict``
            x_0 = self.process.x0(output.float(), z[:, cells], t)
            if not self.shared_frame:
                x_0 = center(x_0)
                anchors = x_0[:, :n_anchors]
                if reference is None:
                    reference = anchors
                elif n_anchors:
                    rotation = kabsch(center(anchors), center(reference))
                    x_0 = (x_0 - anchors.mean(1, keepdim=True)) @ rotation + reference.mean(1, keepdim=True)
            total[:, cells] += x_0
            count[:, cells] += 1
        x_0 = total / count
        return x_0 if self.shared_frame or len(self.contexts) == 1 else center(x_0)

    def estimate_posterior(self, z: Tensor, t: Tensor) -> GaussianPosterior | None:
        """The posterior of each cell, once the noise is as fine as the spacing of cells; None before, and for a single cell."""
        alpha, sigma = self.process.coefficients(t, z)
        n = (sigma / alpha).reshape(())
        if z.shape[1] < 2 or float(n) > REFINEMENT_NOISE * self.spacing:
            return None
        return estimate_posterior(lambda y: self._estimate(alpha * y, t), z / alpha, n, centered=not self.shared_frame)

    def estimate(self, z: Tensor, t: Tensor, posterior: GaussianPosterior | None) -> Tensor:
        """Estimate of the clean positions (1, N, D), by minimum-distance refinement once there is a posterior."""
        if posterior is None:
            return self._estimate(z, t)
        alpha, sigma = self.process.coefficients(t, z)
        x_0 = posterior.refined(self.module.min_distance, z / alpha, (sigma / alpha).reshape(()), self.spacing)
        return x_0 if self.shared_frame else center(x_0)

    @torch.no_grad()
    def sample(
        self, config: SamplingConfig, generator: torch.Generator, on_step: Callable[[], None] | None = None
    ) -> Tensor:
        """Draw positions (N, D) in the canonical frame, or in the frame of the observed cells if there are some."""
        posterior: GaussianPosterior | None = None

        def noise() -> Tensor:
            epsilon = torch.randn(1, len(self.embedding), self.n_dims, generator=generator).to(self.embedding.device)
            return epsilon if self.shared_frame else center(epsilon)

        def denoise(z: Tensor, t: Tensor) -> Tensor:
            if self.observed is not None:
                z[:, self.observed] = self.process.noise(self.value[None], t, noise()[:, self.observed])
            if bool((t >= 1).all()):
                x_0 = self.mean.clone()
            else:
                nonlocal posterior
                posterior = posterior or self.estimate_posterior(z, t)
                x_0 = self.estimate(z, t, posterior)
            if self.observed is not None:
                x_0[:, self.observed] = self.value
            return x_0

        sampler = config.sampler or ("dpm++2m" if self.observed is None else "ddpm")
        step = make_step(sampler, self.process, eta=config.eta)
        x = run_sampler(denoise, step, noise, n_steps=config.n_steps, on_step=on_step)[0]
        return x if self.observed is None else self.to_user_frame(x)
