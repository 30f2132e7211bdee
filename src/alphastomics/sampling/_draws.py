"""Draws of a query: checks of their arguments, random generators, alignment, and several draws in one AnnData."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch

from alphastomics import _keys
from alphastomics.diffusion import MODES
from alphastomics.diffusion.geometry import kabsch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import TissueSchema
    from alphastomics.sampling._sampler import SamplerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawConfig:
    """How many draws are made, and how they are reduced.

    Parameters
    ----------
    n_samples
        Number of draws of each slice.
    reduce
        None for all draws, ``"medoid"`` for one of them, ``"mean"`` for their mean.
    random_state
        Seed of all draws.
    """

    n_samples: int = 1
    reduce: Literal["medoid", "mean"] | None = None
    random_state: int = 0

    def __post_init__(self) -> None:
        if self.n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, got {self.n_samples}")
        if self.reduce not in (None, "medoid", "mean"):
            raise ValueError(f"reduce={self.reduce!r} is unknown; choose None, 'medoid' or 'mean'")


def check_mode(mode: str, trained: str) -> None:
    """Raise ``ValueError`` for a mode that a model trained with the mode ``trained`` cannot sample."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; choose from {', '.join(map(repr, MODES))}")
    if trained not in ("any", mode):
        raise ValueError(
            f"This model was trained with mode={trained!r} and cannot sample mode={mode!r}; train one with "
            f"mode={mode!r} or mode='any'"
        )
    if mode == "any":
        raise ValueError("mode='any' is for training; sample 'expr_to_pos', 'pos_to_expr' or 'joint'")


def check_arguments(
    mode: str,
    config: SamplerConfig,
    draws: DrawConfig,
    *,
    inpaint: bool = False,
    n_cells: int | None = None,
    queried: bool = False,
    selected: bool = False,
) -> None:
    """Raise ``ValueError`` for arguments of :meth:`AlphaSTomics.sample` that are missing or have no effect.

    Parameters
    ----------
    queried, selected
        Whether ``adata`` and ``indices`` were given.
    """
    joint, placing = mode == "joint", mode == "expr_to_pos"
    halves = draws.reduce == "mean" and draws.n_samples > 1  # draws from halves of the genes take the place of views
    errors = {
        "mode='joint' needs n_cells, the number of cells of a new slice": joint and n_cells is None,
        f"n_cells must be at least 1, got {n_cells}": joint and n_cells is not None and n_cells < 1,
        "n_cells is for mode='joint'; the query determines the number of cells": not joint and n_cells is not None,
        "mode='joint' reads no query; leave adata out": joint and queried,
        "mode='joint' reads no query; leave indices out": joint and selected,
        "mode='joint' samples new cells, none of which is known; leave inpaint out": joint and inpaint,
        f"reduce={draws.reduce!r} has no meaning for mode='joint': two draws have different cells; leave reduce out": (
            joint and draws.reduce is not None
        ),
        f"eta={config.eta} is for sampler='ddim'; pass that sampler, or leave eta out": (
            config.eta > 0 and config.sampler != "ddim"
        ),
        f"n_views is for mode='expr_to_pos'; leave it out of mode={mode!r}": not placing and config.n_views > 1,
        f"refine is for mode='expr_to_pos'; leave it out of mode={mode!r}": not placing and config.refine,
        "n_views has no effect on reduce='mean' of several draws; leave one out": halves and config.n_views > 1,
    }
    for message, applies in errors.items():
        if applies:
            raise ValueError(message)


def draw_generator(*key: int) -> torch.Generator:
    """A generator that depends on the key alone."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))


def align_draws(draws: NDArray[np.float64], *, rigid: bool) -> tuple[NDArray[np.float64], int]:
    """Align draws (K, N, D) to their medoid, the draw nearest to all others; return them and the index of the medoid.

    With ``rigid=False`` (a shared frame, or known cells) the draws are returned as they are.
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


def mean_of(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of draws (K, n, D), exact to the bit for cells on which all draws agree, such as known cells."""
    return draws[0] + (draws - draws[0]).mean(0)


def spread(draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard deviation of aligned draws (K, n, D) over all dimensions together, per cell (n,), in their units."""
    return np.sqrt(((draws - mean_of(draws)) ** 2).sum(-1).sum(0) / (len(draws) - 1))


def store_expression(table: AnnData, values: NDArray[np.float32], schema: TissueSchema) -> None:
    """Write expression into ``X`` and the layer of the reference; sparse if it is counts."""
    table.X = sp.csr_matrix(values) if schema.transform == "log1p" else values
    if schema.layer is not None:
        table.layers[schema.layer] = table.X.copy()


def stack_draws(tables: Sequence[AnnData], slice_key: str | None) -> AnnData:
    """Concatenate draws, numbered in ``obs["draw"]`` if there are several."""
    result = tables[0]
    if len(tables) > 1:
        for k, table in enumerate(tables):
            table.obs[_keys.DRAW] = k
        result = ad.concat(list(tables), join="outer", merge="same", index_unique="-")
    if slice_key is not None and slice_key in result.obs:
        result.obs[slice_key] = result.obs[slice_key].astype("category")
    return result
