r"""A network that has not seen a part of the reference, on which the spread of draws is fitted.

Residuals of cells that a network was trained on are too small. A second network of the same architecture is trained without a
fourth of the slices, or of the cells if there is only one slice, for a small share of the steps of the training, in contexts of
the default size. It places the others like those of a new specimen, or like further cells of the same one.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from alphastomics.config import DEFAULT_CONTEXT_SIZE, TrainingConfig
from alphastomics.data import ContextDataset
from alphastomics.nn import Denoiser
from alphastomics.train.objective import Objective
from alphastomics.train.short_training import train_for_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from alphastomics.config import Augmentation, PlanConfig
    from alphastomics.data import CellSource, SliceCells
    from alphastomics.diffusion import Process

logger = logging.getLogger(__name__)

SHARE = 0.2  # of the steps of the training
TIME_SHARE = 0.125  # of the time of the training: a step that places cells only is faster
HELD_OUT = 4  # every fourth slice, or a fourth of the cells of a single slice, is held out
SEED = 1  # added to the seed of the training


class CrossFit(NamedTuple):
    """A network, and the cells that it has not seen.

    Attributes
    ----------
    module
        The network.
    slices
        Slices, or the part of a slice, on which it was trained.
    held_out
        Slices, or the part of a slice, that it has not seen.
    """

    module: Denoiser
    slices: tuple[SliceCells, ...]
    held_out: tuple[SliceCells, ...]


class _PartOfSlice:
    """A source with some of the cells of its only slice."""

    def __init__(self, source: CellSource, cells: SliceCells) -> None:
        self._source, self.slices, self.n_cells = source, (cells,), len(cells.rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """Numbers of the cells, which are read at once."""
        return [np.arange(self.n_cells)]


def cross_fit(
    network: Denoiser,
    source: CellSource,
    *,
    diffusion: Process,
    plan: PlanConfig,
    augmentation: Augmentation,
    n_steps: int,
    seed: int,
) -> CrossFit:
    """Train a network of the architecture of ``network``, whose genes have the same weights and components.

    Parameters
    ----------
    network
        The trained network.
    source
        Its reference, with positions.
    diffusion
        Its diffusion process.
    plan
        Settings of its training.
    augmentation
        Random changes of the contexts of its training.
    n_steps
        Number of steps of its training.
    seed
        Seed of its training.
    """
    part, slices, held_out = divide(source)
    schema, device = source.schema, network.device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + SEED)
        module = Denoiser(network.config).to(device)
        module.gene_weight.copy_(network.gene_weight)
        module.components.copy_(network.components)
        objective = Objective(
            module,
            plan,
            mode="expr_to_pos",
            diffusion=diffusion,
            shared_frame=schema.frame == "shared",
            spacing=schema.spacing / schema.scale,
        )
        dataset = ContextDataset(
            part,
            slices=[cells.name for cells in slices],
            context_size=DEFAULT_CONTEXT_SIZE,
            seed=seed + SEED,
            augmentation=augmentation,
        )
        n_steps = max(1, round(SHARE * n_steps))
        logger.info("Fitting the spread of samples on cells held out (%d steps).", n_steps)
        n_contexts = TrainingConfig.batch_size // DEFAULT_CONTEXT_SIZE
        train_for_steps(objective, [dataset], plan, n_contexts=n_contexts, n_steps=n_steps)
    return CrossFit(module, slices, held_out)


def divide(source: CellSource) -> tuple[CellSource, tuple[SliceCells, ...], tuple[SliceCells, ...]]:
    """A source and its slices to train on, and slices, or a part of one, that are held out."""
    slices = tuple(source.slices)
    if len(slices) > 1:
        return source, tuple(cells for i, cells in enumerate(slices) if i % HELD_OUT != 1), slices[1::HELD_OUT]
    (cells,) = slices
    order = np.random.default_rng(0).permutation(len(cells.rows))
    n = len(order) // HELD_OUT
    used, held_out = (_part(cells, np.sort(part)) for part in (order[n:], order[:n]))
    part: CellSource = _PartOfSlice(source, used)
    return part, (used,), (held_out,)


def _part(cells: SliceCells, index: NDArray[np.int64]) -> SliceCells:
    return cells._replace(rows=cells.rows[index], position=None if cells.position is None else cells.position[index])
