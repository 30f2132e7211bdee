r"""Load of the experts, for the balance loss.

The balance loss of a step uses the load f of each expert e in the step before:

.. math:: f_e^{(s)} \propto \sum_{\text{batches, processes}} n_e^{(s)}, \qquad L_b^{(s+1)} = E \sum_e f_e^{(s)} P_{be}^{(s+1)}

n counts the cells assigned to an expert, and P is its mean probability in context b. The load of the current step is complete
only after its last batch; with that of the last step, the loss does not depend on how a step is divided into batches and
processes. Before the first step the load is even, and the gradient 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.nn import DenoiserConfig


class ExpertLoad:
    """Number of cells (L, E) assigned to each expert in each layer.

    Attributes
    ----------
    last
        That of the last step; None outside of training or without experts.
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._now: Tensor | None = None

    def begin(self, config: DenoiserConfig, device: torch.device) -> None:
        """Start from an even load, or from that of a checkpoint."""
        if not config.use_moe:
            return
        even = torch.ones(config.n_layers, config.num_experts)
        self.last = (even if self.last is None else self.last).to(device)

    def add(self, counts: Tensor) -> None:
        """Add the assignments of one batch of this step."""
        self._now = counts if self._now is None else self._now + counts

    def end_step(self, total: Callable[[Tensor], Tensor]) -> None:
        """Store the counts of this step, summed over all processes by ``total``."""
        if self._now is not None:
            self.last, self._now = total(self._now), None
