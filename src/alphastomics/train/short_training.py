r"""A short training in one process, without Lightning: of a second network, or of a trained one on further cells.

.. math:: \theta \leftarrow \theta - \eta(n)\, \nabla_\theta \frac{1}{|S|} \sum_{s \in S} L_s(\theta), \qquad n = 1, \dots, N

with the losses of the contexts of one or several sources s, by AdamW. The learning rate decreases with the share n / N of the
steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from alphastomics.config import TrainerConfig
from alphastomics.data import Batch
from alphastomics.data._batch import encode_batch
from alphastomics.data._encode import Encoder
from alphastomics.data._loaders import ContextLoader
from alphastomics.train.optimization import learning_rate_factor, make_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from alphastomics.config import PlanConfig
    from alphastomics.data import ContextDataset
    from alphastomics.data._batch import RawBatch
    from alphastomics.train.objective import Objective


class ContextStream(NamedTuple):
    """Contexts of a source, and their objective.

    Attributes
    ----------
    objective
        The losses of a network in these contexts.
    dataset
        The contexts, which are read epoch by epoch without end.
    n_contexts
        Number of contexts of a step.
    """

    objective: Objective
    dataset: ContextDataset
    n_contexts: int

    def batches(self) -> Iterator[Batch]:
        """Batches on the device of the network."""
        loader = ContextLoader(self.dataset, self.n_contexts)
        encoder, device = Encoder(self.dataset.source.schema), self.objective.module.device
        while True:
            for raw in loader:
                yield Batch(*(part.to(device) for part in encode_batch(cast("RawBatch", raw), encoder)))
            self.dataset.set_epoch(self.dataset.epoch + 1)


def train_for_steps(streams: Sequence[ContextStream], plan: PlanConfig, *, n_steps: int) -> None:
    """Train the network of the objectives, which is the same in all ``streams``, and leave it in evaluation mode.

    Every step minimizes the mean of the losses of one batch of each stream.
    """
    module = streams[0].objective.module
    optimizer, batches = make_optimizer(module, plan), [stream.batches() for stream in streams]
    module.train()
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * learning_rate_factor(plan, step, step / n_steps)
        optimizer.zero_grad()
        for stream, each in zip(streams, batches, strict=True):
            batch, objective = next(each), stream.objective
            loss = objective.total(objective.losses(batch, step=step), batch)
            (loss / len(streams)).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), TrainerConfig.gradient_clip_val)
        optimizer.step()
    module.eval()
