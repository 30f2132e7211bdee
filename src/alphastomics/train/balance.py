r"""How much each expert was used in the last step of the optimiser, which is what the balance loss of the next one reads.

.. math:: f_e^{(s)} \propto \sum_{\text{batches, processes}} n_e^{(s)}, \qquad L_b^{(s+1)} = E \sum_e f_e^{(s)} P_{be}^{(s+1)}

A batch cannot know where the cells of other batches go, whose gradients are added to its own. One step later they are known,
so that the loss does not depend on how a step is divided into batches and among processes. Before the first step the use is
even, and the gradient of the loss is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.nn import DenoiserConfig


class ExpertLoad:
    """Assignments (L, E) of the last step.

    Attributes
    ----------
    last
        Those of the last step; None outside of a training, or without experts.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._now: Tensor | None = None

    def begin(self, config: DenoiserConfig, device: torch.device) -> None:
        """Start from even use, unless a checkpoint told another."""
        if not config.use_moe:
            return
        even = torch.ones(config.n_layers, config.num_experts)
        self.last = (even if self.last is None else self.last).to(device)

    def add(self, counts: Tensor) -> None:
        """Count the assignments of one batch of this step."""
        self._now = counts if self._now is None else self._now + counts

    def end_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """Take what was counted, over all processes, for the last step."""
        if self._now is not None:
            self.last, self._now = total(self._now), None
