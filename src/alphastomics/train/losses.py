r"""Expert load of the balance loss, and loss of the minimum-distance network.

The balance loss of a step uses the load f of each expert e in the step before:

.. math:: f_e^{(s)} \propto \sum_{\text{batches, processes}} n_e^{(s)}, \qquad L_b^{(s+1)} = E \sum_e f_e^{(s)} P_{be}^{(s+1)}

n counts the cells assigned to an expert, and P is its mean probability in context b. The load of the current step is complete
only after its last batch; with that of the last step, the loss does not depend on how a step is divided into batches and
processes. Before the first step the load is even, and the gradient 0.

The loss of the minimum-distance network, on neighborhoods x (n, D) at full density, is

.. math:: L = \frac{1}{D\,n} \sum_{i \in \text{inner}} \frac{\lVert \hat x_i - x_i \rVert^2}{r^2}, \qquad
    y = x + r \varepsilon, \quad \log r \sim U(\log r_{\min}, \log r_{\max})

in units of the cell spacing. Cells at the rim of a neighborhood lack neighbors and are excluded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.nn import nearest_neighbors
from alphastomics.train.timesteps import keyed_rng

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from alphastomics.data import Batch
    from alphastomics.nn import DenoiserConfig, MinDistanceNetwork

LOWEST, HIGHEST = 0.03, 6.0  # noise levels of training, in spacings
RIM = 2.5  # width of the excluded rim, in spacings
PURPOSE = 10  # of the generators


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


def min_distance_losses(network: MinDistanceNetwork, batch: Batch, spacing: float, purpose: int) -> Tensor:
    """Loss (B,) of the neighborhood of each context; ``spacing`` is in model units."""
    keys = batch.key.cpu().numpy()
    losses = [
        _min_distance_loss(network, patch[patch.isfinite().all(-1)] / spacing, keyed_rng(key, PURPOSE + purpose))
        for patch, key in zip(batch.patch, keys, strict=True)
    ]
    return torch.stack(losses)


def _min_distance_loss(network: MinDistanceNetwork, x: Tensor, rng: np.random.Generator) -> Tensor:
    r = float(np.exp(rng.uniform(np.log(LOWEST), np.log(HIGHEST))))
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32)).to(x.device)
    radius = x.norm(dim=1)
    inner = radius < radius.max() - RIM - r if len(x) else radius > 0
    if int(inner.sum()) < 2:
        return x.new_zeros(())
    y = x + r * noise
    estimate = network(y, torch.tensor(r, device=x.device), nearest_neighbors(y, network.n_neighbors))
    return ((estimate - x)[inner] ** 2).mean() / r**2
