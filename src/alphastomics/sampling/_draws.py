"""What all directions of sampling have in common: what is refused, how many draws, from which noise, in what AnnData."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anndata as ad
import numpy as np
import torch

from alphastomics import _keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anndata import AnnData

    from alphastomics.sampling._position import SamplerConfig


def check_draws(n_samples: int, reduce: str | None) -> None:
    """Refuse a number of draws, or a way to reduce them, that does not exist."""
    if n_samples < 1:
        raise ValueError(f"n_samples must be at least 1, got {n_samples}")
    if reduce not in (None, "medoid", "mean"):
        raise ValueError(f"reduce={reduce!r} is unknown; choose None, 'medoid' or 'mean'")


def check_effect(
    mode: str,
    config: SamplerConfig,
    *,
    n_samples: int,
    reduce: str | None,
    inpaint: bool = False,
    queried: bool = False,
    selected: bool = False,
) -> None:
    """Refuse arguments of :meth:`AlphaSTomics.sample` that would have no effect beside the others.

    Parameters
    ----------
    queried, selected
        Whether a query was given, and rows of it.
    """
    joint, places, ddim = mode == "joint", mode == "expr_to_pos", config.sampler == "ddim"
    halves = reduce == "mean" and n_samples > 1  # draws from halves of the genes take the place of views
    refused = {
        "mode='joint' reads no query; leave adata out": joint and queried,
        "mode='joint' reads no query; leave indices out": joint and selected,
        "mode='joint' draws new cells, of which none is known; leave inpaint out": joint and inpaint,
        f"eta={config.eta} is for sampler='ddim'; pass that sampler, or leave eta out": config.eta > 0 and not ddim,
        f"n_views is for mode='expr_to_pos'; leave it out of mode={mode!r}": not places and config.n_views > 1,
        f"refine is for mode='expr_to_pos'; leave it out of mode={mode!r}": not places and config.refine,
        "n_views has no effect on reduce='mean' of several draws; leave one out": halves and config.n_views > 1,
    }
    for sentence, holds in refused.items():
        if holds:
            raise ValueError(sentence)


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
