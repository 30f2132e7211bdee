r"""Adaptation of a trained network to the cells of a query, by self-training.

.. math::

    \tilde x = s\,\hat c_\theta(q), \qquad
    \theta \leftarrow \arg\min_\theta \; \tfrac12 L(\theta;\, r, x) + \tfrac12 L(\theta;\, T q, \tilde x)

with expression r and positions x of the reference, the expression q of the query, and the conditional mean :math:`\hat c` of its
positions, an average over both networks (pseudo-labels; Lee 2013, ICML workshop on representation learning). In training, contexts of
the query are changed at random by T as those of the reference are: they lack genes and counts, and differ in composition (noisy student;
Xie et al. 2020, arXiv:1911.04252). The mean is then computed again, for another round. The second network, which only places cells, is
trained for as many of the steps as place cells. A limit of time is divided among these trainings by their numbers of steps.

The mean of uncertain positions is too small. The factor s restores the mean square radius of the reference, so that the network does
not learn smaller positions in each round. Where positions of a slice are known, or all slices share a frame, s is 1. Positions of
the query that are not known are never read.

A query that resembles the reference as much as cells of the reference resemble each other has nothing to adapt to: the errors of the
pseudo-labels remain. :func:`alphastomics.tl.reconstruct` adapts to a query if the confidence (:mod:`alphastomics.sampling._confidence`)
is below .05 for more than twice as many cells as in such a query. The mean by a network of a few hundred steps is not accurate enough to
train on, so networks with a short limit of time are not adapted.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.config import DEFAULT_CONTEXT_SIZE
from alphastomics.data import ContextDataset
from alphastomics.data._views import SourceView
from alphastomics.train.defaults import default_batch_size
from alphastomics.train.objective import Objective
from alphastomics.train.short_training import train_for_steps
from alphastomics.train.timesteps import PLACED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from alphastomics.config import Augmentation, PlanConfig
    from alphastomics.data import CellSource, SliceCells, TissueSchema
    from alphastomics.diffusion import Mode, Process
    from alphastomics.nn import Denoiser

logger = logging.getLogger(__name__)

LEAST_UNMATCHED = 0.1  # share of the cells of a query that match nothing in the reference, above which it is adapted to
ROUNDS = 2
PASSES = 40  # over the cells of the query in a round, at most
SHARE = 0.3  # largest number of steps, as a share of those of the training
TIME_SHARE = 0.3  # of the time of the training
LEAST_SECONDS = 180.0  # of training and adaptation
RATE = 0.5  # learning rate, as a share of that of the training
SEED = 2  # added to the seed of the training


def placed_cells(source: CellSource, slices: Sequence[SliceCells]) -> CellSource:
    """The cells of a query in ``slices``, at positions that were predicted."""
    pairs = zip(source.slices, slices, strict=True)
    placed: CellSource = SourceView(source, [_scaled(source.schema, *pair) for pair in pairs])
    return placed


def _scaled(schema: TissueSchema, cells: SliceCells, predicted: SliceCells) -> SliceCells:
    """Predicted positions of a slice with the radius of the reference, unless positions of ``cells`` are known."""
    x = predicted.position
    assert x is not None  # it was predicted
    known = cells.position is not None and np.isfinite(cells.position).all(1).any()
    radius = float(np.sqrt(np.square(x - x.mean(0)).mean()))
    if known or schema.frame == "shared" or radius == 0:
        return predicted
    return predicted._replace(position=x.mean(0) + (x - x.mean(0)) * (schema.scale / radius))


def adapt(
    network: Denoiser,
    second: Denoiser | None,
    reference: CellSource,
    query: CellSource,
    *,
    predict: Callable[[], Sequence[SliceCells]],
    mode: Mode,
    diffusion: Process,
    plan: PlanConfig,
    augmentation: Augmentation,
    n_steps: int,
    seed: int,
    max_seconds: float = math.inf,
) -> int:
    """Train a network further, on its reference and on a query at the positions that it predicts.

    Parameters
    ----------
    network, second
        The trained network, and the second one if there is one; both are changed.
    reference
        Its reference, with positions.
    query
        The cells to which it is adapted.
    predict
        Function that returns the slices of ``query`` with the mean positions of their cells by the present weights.
    mode, diffusion
        What the network was trained to sample, and its diffusion process.
    plan, augmentation, n_steps, seed
        Settings of its training, its number of steps and its seed.
    max_seconds
        Longest time.

    Returns
    -------
    Number of steps of the network.
    """
    end = time.monotonic() + max_seconds
    n_cells = default_batch_size(network.device) // 2  # of the reference in a step, and as many of the query
    n_round = max(1, round(min(PASSES * query.n_cells / n_cells, SHARE * n_steps / ROUNDS)))
    logger.info("Adapting the network to %d cells of the query (at most %d steps).", query.n_cells, ROUNDS * n_round)
    plan = replace(plan, lr=RATE * plan.lr)
    if not query.has_counts:
        augmentation = replace(augmentation, thinning=0.0)
    trained: list[tuple[Denoiser, Mode, int]] = [(network, mode, n_round)]
    if second is not None:
        trained.append((second, "expr_to_pos", max(1, round(PLACED[mode] * n_round))))
    n_contexts = n_cells // DEFAULT_CONTEXT_SIZE
    train = partial(_train, diffusion=diffusion, plan=plan, augmentation=augmentation, n_contexts=n_contexts)
    n_done, n_left = 0, ROUNDS * sum(n for *_, n in trained)
    for number in range(SEED, SEED + ROUNDS):
        placed = placed_cells(query, predict())
        for module, purpose, n in trained:
            seconds, n_left = (end - time.monotonic()) * n / n_left, n_left - n
            if seconds > 0:
                n_made = train(
                    module, [reference, placed], mode=purpose, n_steps=n, max_seconds=seconds, seed=seed + number
                )
                n_done += n_made if module is network else 0
    return n_done


def _train(
    network: Denoiser,
    sources: Sequence[CellSource],
    *,
    diffusion: Process,
    plan: PlanConfig,
    augmentation: Augmentation,
    mode: Mode,
    n_contexts: int,
    n_steps: int,
    max_seconds: float,
    seed: int,
) -> int:
    """Train a network for some steps, or for some time, on contexts of each source in every step."""
    schema = sources[0].schema
    objective = Objective(
        network,
        plan,
        mode=mode,
        diffusion=diffusion,
        shared_frame=schema.frame == "shared",
        spacing=schema.spacing / schema.scale,
    )
    datasets = [
        ContextDataset(
            source,
            context_size=DEFAULT_CONTEXT_SIZE,
            seed=seed,
            augmentation=augmentation,
            targets=mode != "expr_to_pos",
        )
        for source in sources
    ]
    with torch.random.fork_rng([network.device] if network.device.type == "cuda" else []):
        torch.manual_seed(seed)
        return train_for_steps(
            objective, datasets, plan, n_contexts=n_contexts, n_steps=n_steps, max_seconds=max_seconds
        )
