r"""Sampling the positions of one slice whose expression is known.

A slice is denoised as one context: all its cells attend to each other. Where it is larger than ``max_context``, the
cells are split into contexts that share the same anchor cells,

.. math::

    \hat x_0^{(b)} = f(z_{A \cup B_b}), \qquad
    \hat x_0 \leftarrow \hat x_0^{(b)} R_b + \delta_b, \quad
    (R_b, \delta_b) = \arg\min \lVert \hat x^{(b)}_{0,A} R + \delta - \hat x^{(1)}_{0,A} \rVert^2,

the anchors being averaged over contexts, at every step of the chain: one joint sample, without seams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from alphastomics.diffusion import SWITCH, Process, make_step, run_sampler
from alphastomics.diffusion.geometry import align, center, kabsch
from alphastomics.sampling._layout import refine_layout
from alphastomics.sampling._posterior import GaussianPosterior, estimate_posterior

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.data import CellSource
    from alphastomics.diffusion import DiffusionConfig, SamplerName
    from alphastomics.nn import Denoiser, Prediction

ROWS = 4096  # cells whose expression is dense at the same time
ANCHOR_SHARE = 0.25
VIEW_DROPOUT = 0.2  # share of the genes that a view leaves out
VIEW_CONTEXT = 1024  # cells of a view that attend to each other
MAX_CONTEXT = 32_768  # cells that attend to each other


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerConfig:
    """How a chain is run.

    Parameters
    ----------
    n_steps
        Number of calls of the denoiser; 1 gives the conditional mean.
    sampler
        ``"ddpm"``, ``"ddim"`` or ``"dpm++2m"``; None takes the last, and the first where positions are known.
    eta
        Noise of ``"ddim"``, between 0 (none) and 1 (that of ``"ddpm"``).
    max_context
        Largest number of cells that attend to each other.
    n_views
        Number of views over which the conditional mean is averaged, see :meth:`PositionSampler.average_views`; 1 uses
        the whole slice as it is.
    refine
        Whether to move the conditional mean towards the neighborhood embedding, see :func:`refine_layout`.
    """

    n_steps: int = 30
    sampler: SamplerName | None = None
    eta: float = 0.0
    max_context: int = MAX_CONTEXT
    n_views: int = 1
    refine: bool = False

    def __post_init__(self) -> None:
        if self.n_steps < 1:
            raise ValueError(f"n_steps must be at least 1, got {self.n_steps}")
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta={self.eta} must lie between 0 and 1")
        if self.n_views < 1:
            raise ValueError(f"n_views must be at least 1, got {self.n_views}")
        if self.sampler is not None:
            make_step(self.sampler, Process())  # refuses an unknown name


def content_order(source: CellSource, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """``rows`` sorted by a hash of their expression.

    Sums over cells and noise per cell then depend on which cells there are, not on the order of the rows: permuting
    the rows permutes the result, to the bit.
    """
    weights = np.random.default_rng(0).integers(1, 2**63, size=source.schema.n_genes, dtype=np.uint64)
    hashes = [
        (np.ascontiguousarray(source.expression(block)).view(np.uint32).astype(np.uint64) * weights).sum(1)
        for block in _blocks(rows)
    ]
    return rows[np.argsort(np.concatenate(hashes), kind="stable")]


def _blocks(rows: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]


@torch.no_grad()
def embed_cells(
    module: Denoiser,
    source: CellSource,
    rows: NDArray[np.int64],
    device: torch.device,
    genes: NDArray[np.bool_] | None = None,
) -> Tensor:
    """Embedding of clean expression (N, d) without ever holding (N, G).

    Genes that the cells lack, or that ``genes`` (G,) leaves out, are treated as genes dropped in training: what is left
    is scaled up.
    """
    zero = torch.zeros(1, device=device)
    used = source.measured if genes is None else source.measured & genes
    gain = used / np.sqrt(used.mean())
    parts = [
        module.embed_expression(
            torch.from_numpy(source.expression(block) * gain.astype(np.float32)).to(device)[None], zero
        )[0]
        for block in _blocks(rows)
    ]
    return torch.cat(parts)


def cell_order(module: Denoiser, source: CellSource, rows: NDArray[np.int64]) -> Tensor | None:
    """Index (N,) of some cells in their order, from 0; None where the network reads none.

    Raises
    ------
    KeyError
        If it reads one, and the cells have none.
    """
    if not module.config.reads_sequence:
        return None
    order = source.sequence(rows)
    if order is None:
        raise KeyError(
            f'obs["{source.schema.sequence_key}"] is missing: this model was made with '
            f'sequence_key="{source.schema.sequence_key}", and its network reads the order of the cells'
        )
    return torch.from_numpy((order - order.min()).astype(np.float32)).to(module.device)


class PositionSampler:
    """The positions of one slice, given the expression of its cells.

    Parameters
    ----------
    module, diffusion
        The trained network and its processes.
    embedding
        Embedded expression (N, d).
    shared_frame
        Whether positions are registered.
    spacing
        Distance between neighboring cells in model units.
    max_context
        Largest number of cells that attend to each other.
    observed
        Known positions (N, D) in user frame and model units, NaN where unknown; None when nothing is known.
    sequence
        Index of the cells in their order (N,), see :func:`cell_order`; None when the network reads none.
    """

    def __init__(
        self,
        module: Denoiser,
        diffusion: DiffusionConfig,
        embedding: Tensor,
        *,
        shared_frame: bool,
        spacing: float,
        max_context: int,
        observed: Tensor | None = None,
        sequence: Tensor | None = None,
    ) -> None:
        self.sequence = sequence
        self.module, self.process, self.shared_frame = module, diffusion.position, shared_frame
        self.embedding, self.spacing = embedding, spacing
        self.n_dims = module.config.n_dims
        self.max_context = max_context
        self.contexts = split_contexts(len(embedding), max_context, embedding.device)
        self.mean = self._estimate(embedding.new_zeros(1, len(embedding), self.n_dims), embedding.new_ones(1))
        self.known: Tensor | None = None
        if observed is not None:
            self.known = observed.isfinite().all(-1)
            self._fix_frame(observed)

    def _fix_frame(self, observed: Tensor) -> None:
        """Take the known positions into the canonical frame: they fix it, the estimate only says which way it points."""
        known = self.known
        x, y = observed[known], self.mean[0, known]
        self.offset = x.mean(0)
        self.rotation = torch.eye(self.n_dims, device=x.device)
        self.shift = torch.zeros_like(self.offset) if not self.shared_frame else self.offset
        if not self.shared_frame:
            self.rotation = kabsch((x - self.offset)[None], (y - y.mean(0))[None])[0]
            self.shift = y.mean(0)
        self.value = (x - self.offset) @ self.rotation + self.shift

    def to_user_frame(self, x: Tensor) -> Tensor:
        """Positions (N, D) of the canonical frame in the frame of the known cells."""
        return (x - self.shift) @ self.rotation.T + self.offset

    @torch.no_grad()
    def average_views(
        self, source: CellSource, rows: NDArray[np.int64], n_views: int, rng: np.random.Generator
    ) -> None:
        """Replace the conditional mean by its average over views, as a network trained with dropout is averaged.

        A view leaves out a random fifth of the genes and divides the slice at random into contexts; each context is
        placed on its own and turned onto the mean of the whole slice.
        """
        n, whole = len(rows), self.mean
        total = torch.zeros_like(whole)
        one = self.embedding.new_ones(1)
        n_contexts = max(1, round(n / VIEW_CONTEXT), -(-n // self.max_context))
        for _ in range(n_views):
            genes = rng.random(source.schema.n_genes) >= VIEW_DROPOUT
            if not (genes & source.measured).any():  # of very few genes
                genes = source.measured
            embedding = embed_cells(self.module, source, rows, self.embedding.device, genes)
            for cells in torch.from_numpy(rng.permutation(n)).tensor_split(n_contexts):
                absent = whole.new_zeros(1, len(cells), self.n_dims)
                h = embedding[cells][None] + self.module.position_missing
                output = self._trunk(h, one, cells, ("position",)).position
                assert output is not None  # it was asked for
                x_0 = self.process.x0(output.float(), absent, one)
                total[:, cells] += x_0 if self.shared_frame else align(x_0, whole[:, cells])
        self.mean = total / n_views

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
        """The blocks on embeddings ``h`` (1, n, d) of some cells, whose noisy positions are all that is known of their places."""
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
            assert output is not None  # it was asked for
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
        """What expression says of each cell, where the noise is as fine as cells are spaced; None elsewhere and for one cell."""
        alpha, sigma = self.process.coefficients(t, z)
        n = (sigma / alpha).reshape(())
        if z.shape[1] < 2 or float(n) > SWITCH * self.spacing:
            return None
        return estimate_posterior(lambda y: self._estimate(alpha * y, t), z / alpha, n, centered=not self.shared_frame)

    def estimate(self, z: Tensor, t: Tensor, posterior: GaussianPosterior | None) -> Tensor:
        """Estimate of the clean positions (1, N, D), by packing where there is a belief."""
        if posterior is None:
            return self._estimate(z, t)
        alpha, sigma = self.process.coefficients(t, z)
        x_0 = posterior.packed(self.module.min_distance, z / alpha, (sigma / alpha).reshape(()), self.spacing)
        return x_0 if self.shared_frame else center(x_0)

    @torch.no_grad()
    def sample(
        self, config: SamplerConfig, generator: torch.Generator, on_step: Callable[[], None] | None = None
    ) -> Tensor:
        """Draw positions (N, D): in the canonical frame, or in that of the known cells where there are some."""
        posterior: GaussianPosterior | None = None

        def noise() -> Tensor:
            epsilon = torch.randn(1, len(self.embedding), self.n_dims, generator=generator).to(self.embedding.device)
            return epsilon if self.shared_frame else center(epsilon)

        def denoise(z: Tensor, t: Tensor) -> Tensor:
            if self.known is not None:
                z[:, self.known] = self.process.noise(self.value[None], t, noise()[:, self.known])
            if bool((t >= 1).all()):
                x_0 = self.mean.clone()
            else:
                nonlocal posterior
                posterior = posterior or self.estimate_posterior(z, t)
                x_0 = self.estimate(z, t, posterior)
            if self.known is not None:
                x_0[:, self.known] = self.value
            return x_0

        sampler = config.sampler or ("dpm++2m" if self.known is None else "ddpm")
        step = make_step(sampler, self.process, eta=config.eta)
        x = run_sampler(denoise, step, noise, n_steps=config.n_steps, on_step=on_step)[0]
        return x if self.known is None else self.to_user_frame(x)


def split_contexts(n_cells: int, max_context: int, device: torch.device) -> list[tuple[Tensor, int]]:
    """Contexts that cover all cells: (cell numbers, how many of the first are anchors common to all)."""
    every = torch.arange(n_cells, device=device)
    if n_cells <= max_context:
        return [(every, 0)]
    n_anchors = int(ANCHOR_SHARE * max_context)
    anchors, rest = every[:n_anchors], every[n_anchors:]
    n_blocks = -(-len(rest) // (max_context - n_anchors))
    return [(torch.cat([anchors, block]), n_anchors) for block in rest.tensor_split(n_blocks)]


def align_draws(draws: NDArray[np.float64], *, rigid: bool) -> tuple[NDArray[np.float64], int]:
    """Align draws (K, N, D) to their medoid, the draw nearest to all others; returns them and its number.

    ``rigid=False`` (a shared frame, or known cells) only finds the medoid.
    """
    moved = torch.from_numpy(draws)
    n = len(moved)
    error = np.zeros((n, n))
    aligned = {}
    for j in range(n):
        target = moved[j : j + 1].expand(n, -1, -1)
        offset = target.mean(1, keepdim=True)
        source = moved - moved.mean(1, keepdim=True)
        aligned[j] = (source @ kabsch(source, target - offset) + offset if rigid else moved).numpy()
        error[j] = ((aligned[j] - draws[j]) ** 2).sum(-1).mean(-1)
    medoid = int(error.sum(1).argmin())
    return aligned[medoid], medoid
