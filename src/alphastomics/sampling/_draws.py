"""Draws of a query: check of the mode, progress, random generators, alignment, and several draws in one AnnData."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import scipy.sparse as sp
import torch
from scvi import settings
from tqdm.auto import tqdm

from alphastomics import _keys
from alphastomics.diffusion.geometry import align

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData
    from numpy.typing import NDArray

    from alphastomics.data import TissueSchema


def check_mode(mode: str, trained: str) -> None:
    """Raise ``ValueError`` for a mode that a model trained with the mode ``trained`` cannot sample."""
    if trained not in ("any", mode):
        raise ValueError(
            f"This model was trained with mode={trained!r} and cannot sample with mode={mode!r}; train a model with "
            f"mode={mode!r} or mode='any'"
        )


def progress_bar(total: int, description: str, unit: str = "step") -> tqdm:
    """A progress bar, which is hidden if ``scvi.settings.verbosity`` hides messages."""
    return tqdm(total=total, desc=description, unit=unit, disable=settings.verbosity > logging.INFO)


def draw_generator(*key: int) -> torch.Generator:
    """A generator that depends on the key alone."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))


def align_draws(draws: NDArray[np.float64], *, rigid: bool) -> tuple[NDArray[np.float64], int]:
    """Align draws (K, N, D) to their medoid, the draw nearest to all others; return them and the index of the medoid.

    With ``rigid=False`` (a shared frame, or observed cells) the draws are returned as they are.
    """
    x = torch.from_numpy(draws)

    def aligned(j: int) -> NDArray[np.float64]:
        return align(x, x[j].expand_as(x)).numpy() if rigid else draws

    error = [((aligned(j) - draws[j]) ** 2).sum() for j in range(len(draws))]
    medoid = int(np.argmin(error))
    return aligned(medoid), medoid


def store_expression(table: AnnData, values: NDArray[np.float32], schema: TissueSchema) -> None:
    """Write expression into ``X`` and the layer of the reference; sparse if it is counts."""
    table.X = sp.csr_matrix(values) if schema.transform == "log1p" else values
    if schema.layer is not None:
        table.layers[schema.layer] = table.X.copy()


def stack_draws(tables: Sequence[AnnData], slice_key: str | None) -> AnnData:
    """Concatenate draws, numbered in ``obs["draw"]``, with categorical slices; a single one is returned as it is."""
    if len(tables) == 1:
        return tables[0]
    for k, table in enumerate(tables):
        table.obs[_keys.DRAW] = k
    result = ad.concat(list(tables), join="outer", merge="same", index_unique="-")
    if slice_key is not None and slice_key in result.obs:
        result.obs[slice_key] = result.obs[slice_key].astype("category")
    return result
