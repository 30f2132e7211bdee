"""Random numbers of a batch of training, which the loader draws on the CPU, before the batch is moved to the device of training.

All draws are keyed by (seed, epoch, context) and a purpose, so that they do not depend on the division into batches and processes, and
are made for real cells only, so that they do not depend on the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.data._draws import Draws
from alphastomics.diffusion.deformation import draw_deformation
from alphastomics.train.timesteps import draw_observed, draw_timesteps, keyed_rng, stratified_uniform

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from alphastomics.config import PlanConfig
    from alphastomics.data import Batch
    from alphastomics.diffusion import Mode
    from alphastomics.train.timesteps import Timesteps

# Purposes of the generators that are keyed by context.
TRAINING, VALIDATION, DEFORMATION, OBSERVED, TYPES = 0, 1, 2, 3, 60
ALL_HIDDEN = 0.5  # share of the contexts in which no cell type is known


@dataclass(frozen=True, kw_only=True)
class DrawContexts:
    """Draws the random numbers of a batch; a call returns its :class:`~alphastomics.data._draws.Draws`.

    Parameters
    ----------
    mode
        What the network is trained to sample.
    config
        Settings of the training.
    cell_types
        Whether cell types are an input.
    purpose
        ``TRAINING`` or ``VALIDATION``, which draw different noise; in validation nothing is deformed or hidden.
    """

    mode: Mode
    config: PlanConfig
    cell_types: bool
    purpose: int = TRAINING

    def __call__(self, batch: Batch) -> Draws:
        """Draw for the contexts of a batch, whose mask and keys are used."""
        # A copy: the memory of a tensor moves when a loader process sends it.
        keys: NDArray[np.int64] = batch.key.cpu().numpy().copy()
        (_, n_cells, n_genes), n_dims = batch.expression.shape, batch.position.shape[2]
        numbers = tuple(batch.mask.sum(1).tolist())
        rngs = [keyed_rng(key, self.purpose) for key in keys]
        timesteps = [self._timesteps(key, rng) for key, rng in zip(keys, rngs, strict=True)]
        shape = len(keys), n_cells, 0 if self.mode == "expr_to_pos" else n_genes
        noise, observed = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.bool_)
        for i, (key, rng, n, (t, _)) in enumerate(zip(keys, rngs, numbers, timesteps, strict=True)):
            if 0 < t < 1:
                noise[i, :n] = rng.standard_normal((n, n_genes), dtype=np.float32)
            if t > 0:
                observed[i, :n] = draw_observed(n, n_genes, keyed_rng(key, OBSERVED + self.purpose))
        placed = tuple(t.position >= 1 for t in timesteps)
        given = [i for i, is_placed in enumerate(placed) if not is_placed]
        return Draws(
            t_expr=torch.tensor([t.expression for t in timesteps]),
            t_pos=torch.tensor([t.position for t in timesteps]),
            noise=torch.from_numpy(noise),
            observed=torch.from_numpy(observed),
            hidden_type=torch.from_numpy(self._hidden_types(keys, numbers, n_cells)),
            absent=torch.tensor([i for i, is_placed in enumerate(placed) if is_placed], dtype=torch.int64),
            given=torch.tensor(given, dtype=torch.int64),
            deformation=self._deformation(keys[given], n_dims),
            placed=placed,
            n_cells=numbers,
            key=keys,
        )

    def given(self, key: NDArray[np.int64]) -> bool:
        """Whether positions are an input in the context with a ``key``."""
        return self._timesteps(key, keyed_rng(key, self.purpose)).position < 1

    def _timesteps(self, key: NDArray[np.int64], rng: np.random.Generator) -> Timesteps:
        kind = stratified_uniform(key, self.purpose)
        return draw_timesteps(self.mode, rng, modality_dropout=self.config.modality_dropout, kind=kind)

    def _hidden_types(self, keys: NDArray[np.int64], numbers: Iterable[int], n_cells: int) -> NDArray[np.bool_]:
        """Cells (B, N) whose type is hidden: a random share of each context, and all of them in some contexts."""
        if not self.cell_types or self.purpose == VALIDATION:
            return np.zeros((len(keys), 0), dtype=np.bool_)
        hidden = np.zeros((len(keys), n_cells), dtype=np.bool_)
        for row, key, n in zip(hidden, keys, numbers, strict=True):
            rng = keyed_rng(key, TYPES)
            share = 1.0 if rng.random() < ALL_HIDDEN else rng.random()
            row[:n] = rng.random(n) < share
        return hidden

    def _deformation(self, keys: NDArray[np.int64], n_dims: int) -> tuple[torch.Tensor, ...] | None:
        """Deformations of the contexts with ``keys`` (M, 3)."""
        strength = self.config.deformation
        if not strength or self.purpose == VALIDATION or not len(keys):
            return None
        drawn = [draw_deformation(n_dims, strength, keyed_rng(key, DEFORMATION)) for key in keys]
        return tuple(torch.stack(parts).float() for parts in zip(*drawn, strict=True))
