r"""A network that has not seen a part of the reference, which fits the length of the training and the placement.

Residuals of cells that a network was trained on are too small. Before the training, a second network of the same architecture is
trained without every fourth slice, from the second one on (one of two to five slices), or without a fourth of the cells if there is
only one slice, in contexts of the default size, at a constant learning rate. The moving average of its weights,

.. math:: \bar\theta_n = \beta_n \bar\theta_{n-1} + (1 - \beta_n)\, \theta_n, \qquad \beta_n = \min(.99, \tfrac{n}{n + 9}),

places the held-out cells after :math:`n = 250, 500, 1000, \dots` steps and at the end. It is kept where their score is highest, after
:math:`n^\star` steps; two lower scores in succession end its training. If the score is lower after twice as many steps,

.. math:: N = \frac{n^\star}{p} \frac{M}{M'}

steps are sufficient for a training with M cells in place of M' that places a share p of its contexts: with more of them the network
memorizes the specimens of the reference. Scores after nearly as many steps differ by chance.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from alphastomics.config import DEFAULT_CONTEXT_SIZE
from alphastomics.data import ContextDataset
from alphastomics.data._views import SourceView
from alphastomics.nn import Denoiser
from alphastomics.train.ema import update_average
from alphastomics.train.objective import Objective
from alphastomics.train.optimization import NonFiniteLossError, learning_rate_factor
from alphastomics.train.short_training import training_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray
    from torch import Tensor

    from alphastomics.config import Augmentation, PlanConfig
    from alphastomics.data import CellSource, SliceCells
    from alphastomics.diffusion import Process

logger = logging.getLogger(__name__)

SHARE = 0.5  # of the steps of the training in which cells are placed, and of those of the default training, at most
TIME_SHARE = 0.125  # of the time of the training, at most: a step that places cells only is faster
FIRST = 250  # number of steps after which the cells are placed for the first time, and then after twice as many
PATIENCE = 2  # lower scores in succession
DECAY = 0.99  # beta
HELD_OUT = 4  # every fourth slice, from the second one on, or a fourth of the cells of a single slice, is held out
SEED = 1  # added to the seed of the training


class PlacementScores(Protocol):
    """Scores of the placement of held-out cells."""

    @property
    def log_odds(self) -> float:
        """By which placements are compared, larger for a better one."""

    def to_dict(self) -> dict[str, float] | None:
        """The scores, with those of chance; None if they are not finite."""


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
    n_steps
        Number of steps after which it placed them best.
    is_best
        Whether it placed them worse after twice as many steps.
    scores
        Scores of its placement; None if too few cells are held out.
    """

    module: Denoiser
    slices: tuple[SliceCells, ...]
    held_out: tuple[SliceCells, ...]
    n_steps: int
    is_best: bool
    scores: PlacementScores | None

    def sufficient_steps(self, placed: float) -> int | None:
        """Number N of steps that are sufficient for a training that places a share of its contexts; None if it is not known."""
        if not self.is_best:
            return None
        n_seen, n_held_out = (sum(len(cells.rows) for cells in part) for part in (self.slices, self.held_out))
        return round(self.n_steps / placed * (n_seen + n_held_out) / n_seen)


class _PartOfSlice(SourceView):
    """A source with some of the cells of its only slice."""

    def __init__(self, source: CellSource, cells: SliceCells) -> None:
        super().__init__(source, [cells])
        self.n_cells = len(cells.rows)

    def pieces(self, slice_index: int) -> list[NDArray[np.int64]]:
        """Numbers of the cells, which are read at once."""
        return [np.arange(self.n_cells)]


def cross_fit(
    network: Denoiser,
    source: CellSource,
    *,
    diffusion: Process,
    plan: PlanConfig,
    augmentation: Augmentation | None,
    score: Callable[[Denoiser, tuple[SliceCells, ...]], PlacementScores | None],
    n_contexts: int,
    max_steps: int,
    max_seconds: float | None = None,
    seed: int,
    device: torch.device,
) -> CrossFit:
    """Train a network of the architecture of ``network``, whose genes have the same weights and components.

    Parameters
    ----------
    network
        The network of the training.
    source
        Its reference, with positions.
    diffusion
        Its diffusion process.
    plan
        Settings of its training.
    augmentation
        Random changes of the contexts of its training.
    score
        Scores of the placement of held-out cells by a network; None if they are too few.
    n_contexts
        Number of contexts in a batch.
    max_steps, max_seconds
        Largest number of steps, and longest time.
    seed
        Seed of the training.
    device
        Device on which the second network is trained.

    Raises
    ------
    NonFiniteLossError
        If the loss or the weights become NaN or infinite.
    """
    part, slices, held_out = divide(source)
    schema, end = source.schema, time.monotonic() + (float("inf") if max_seconds is None else max_seconds)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
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
        steps = training_steps(
            objective,
            [dataset],
            plan,
            n_contexts=n_contexts,
            rate_factor=lambda step: learning_rate_factor(plan, step, 0.0),
        )
        logger.info("Fitting the length of the training on cells held out (up to %d steps).", max_steps)
        best = _Best(module, lambda average: score(average, held_out))
        for n in steps:
            best.update(module)
            is_last = n >= max_steps or time.monotonic() > end
            if is_last or (n >= FIRST and n % FIRST == 0 and (n // FIRST).bit_count() == 1):
                best.compare(n)
            if is_last or best.n_worse == PATIENCE:
                break
    if not best.n_steps:
        raise NonFiniteLossError(
            f"The weights of a second network became infinite within {n} steps. Lower plan_kwargs['lr'], or check the expression for "
            "extreme values."
        )
    return CrossFit(best.module, slices, held_out, best.n_steps, is_best=n >= 2 * best.n_steps, scores=best.scores)


class _Best:
    """Moving average of weights, and a copy of the one with the highest score."""

    def __init__(self, module: Denoiser, score: Callable[[Denoiser], PlacementScores | None]) -> None:
        self._average = copy.deepcopy(module).eval()
        self._score, self._highest, self._n_updates = score, float("-inf"), 0
        self.module, self.n_steps, self.n_worse = self._average, 0, 0
        self.scores: PlacementScores | None = None

    @torch.no_grad()
    def update(self, module: Denoiser) -> None:
        """Update the average."""
        average: list[Tensor] = [*self._average.parameters()]
        weights: list[Tensor] = [*module.parameters()]
        update_average(average, weights, self._n_updates, DECAY)
        self._n_updates += 1

    def compare(self, n_steps: int) -> None:
        """Keep a copy of the average if its score is the highest so far, or if there is none."""
        scores = self._score(self._average)
        if scores is not None and scores.log_odds <= self._highest:
            self.n_worse += 1
            return
        self._highest = float("-inf") if scores is None else scores.log_odds
        self.scores, self.module, self.n_steps, self.n_worse = scores, copy.deepcopy(self._average), n_steps, 0


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
