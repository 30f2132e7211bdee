"""What all directions of sampling have in common: how many draws, from which noise, in what AnnData."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import torch

from alphastomics import _keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData


def check_draws(n_samples: int, reduce: str | None) -> None:
    """Refuse a number of draws, or a way to reduce them, that does not exist."""
    if n_samples < 1:
        raise ValueError(f"n_samples must be at least 1, got {n_samples}")
    if reduce not in (None, "medoid", "mean"):
        raise ValueError(f"reduce={reduce!r} is unknown; choose None, 'medoid' or 'mean'")


def draw_generator(*key: int) -> torch.Generator:
    """A generator that depends on the key alone."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))


def stack_draws(tables: Sequence[AnnData], slice_key: str | None) -> AnnData:
    """Draws one after the other, numbered in ``obs["draw"]`` when there are several."""
    result = tables[0]
    if len(tables) > 1:
        for k, table in enumerate(tables):
            table.obs[_keys.DRAW] = k
        result = ad.concat(list(tables), join="outer", merge="same", index_unique="-")
    if slice_key is not None and slice_key in result.obs:
        result.obs[slice_key] = result.obs[slice_key].astype("category")
    return result
