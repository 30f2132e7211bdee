r"""A short training in one process, without Lightning: of a second network, or of a trained one on further cells.

.. math:: \theta \leftarrow \theta - \eta(n)\, \nabla_\theta \frac{1}{|S|} \sum_{s \in S} L_s(\theta), \qquad n = 1, \dots, N

with the losses of the contexts of one or several sources s, by AdamW. The learning rate decreases with the share of the training that
is done, of the steps, n / N, or of the time, whichever is larger.
"""

from __future__ import annotations

import math
import time
from itertools import count
from typing import TYPE_CHECKING, cast

import torch
from lightning.fabric.utilities import move_data_to_device

from alphastomics.config import TrainerConfig
from alphastomics.data._batch import encode_batch
from alphastomics.data._encode import Encoder
from alphastomics.data._loaders import ContextLoader
from alphastomics.train.draws import TRAINING
from alphastomics.train.finite import FiniteCheck
from alphastomics.train.optimization import NonFiniteLossError, learning_rate_factor, make_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from alphastomics.config import PlanConfig
    from alphastomics.data import Batch, ContextDataset
    from alphastomics.data._batch import RawBatch
    from alphastomics.train.objective import Objective


def train_for_steps(
    objective: Objective,
    datasets: Sequence[ContextDataset],
    plan: PlanConfig,
    *,
    n_contexts: int,
    n_steps: int,
    max_seconds: float = math.inf,
) -> int:
    """Train the network of an objective, leave it in evaluation mode, and return the number of steps.

    The training ends after ``n_steps`` steps, or after the first step that ends later than ``max_seconds``.
    """
    started = time.monotonic()

    def progress(step: int) -> float:
        """Share of the training that is done after a number of steps, by steps or by time, whichever is larger."""
        return min(1.0, max(step / n_steps, (time.monotonic() - started) / max_seconds))

    n_done = 0
    steps = training_steps(
        objective,
        datasets,
        plan,
        n_contexts=n_contexts,
        rate_factor=lambda step: learning_rate_factor(plan, step, progress(step)),
    )
    try:
        for n_done in steps:
            if progress(n_done) >= 1:
                break
    finally:
        objective.module.eval()
    return n_done


def training_steps(
    objective: Objective,
    datasets: Sequence[ContextDataset],
    plan: PlanConfig,
    *,
    n_contexts: int,
    rate_factor: Callable[[int], float],
) -> Iterator[int]:
    """Train the network of an objective without end, and yield the number of steps after each.

    Every step minimizes the mean of the losses of one batch of ``n_contexts`` contexts of each of ``datasets``, with the learning
    rate of ``plan`` multiplied by ``rate_factor`` of the number of steps before it. Raises ``NonFiniteLossError`` if the gradient
    is NaN or infinite.
    """
    module = objective.module
    finite = FiniteCheck(module.device)
    optimizer, batches = make_optimizer(module, plan), [_batches(each, n_contexts, objective) for each in datasets]
    module.train()
    objective.load.begin(module.config, module.device)
    for step in count():
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * rate_factor(step)
        optimizer.zero_grad()
        for batch in map(next, batches):
            (objective.total(objective.losses(batch, step=step), batch) / len(datasets)).backward()
        objective.load.end_step(lambda counts: counts)  # not summed: other processes need not take part
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), TrainerConfig.gradient_clip_val)
        found_inf = finite.add(step, norm)
        if found_inf.is_cuda:
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]  # of a fused step, which it skips
        if finite.first is not None:
            raise NonFiniteLossError(
                f"The gradient is NaN or infinite at step {finite.first} of the training of a second network or on a query. "
                "Lower plan_kwargs['lr'], or check the expression for extreme values."
            )
        optimizer.step()
        yield step + 1


def _batches(dataset: ContextDataset, n_contexts: int, objective: Objective) -> Iterator[Batch]:
    """Batches of contexts on the device of the network, epoch by epoch without end."""
    loader, encoder = (
        ContextLoader(dataset, n_contexts, draw=objective.drawing(TRAINING)),
        Encoder(dataset.source.schema),
    )
    while True:
        for raw in loader:
            yield encode_batch(move_data_to_device(cast("RawBatch", raw), objective.module.device), encoder)
        dataset.set_epoch(dataset.epoch + 1)
