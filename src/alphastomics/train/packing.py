r"""Loss of the packing network, on neighbourhoods at full density.

.. math:: L = \frac{1}{D\,n} \sum_{i \in \text{inner}} \frac{\lVert \hat x_i - x_i \rVert^2}{r^2}, \qquad
    y = x + r \varepsilon, \quad \log r \sim U(\log r_{\min}, \log r_{\max})

in units of the cell spacing. Cells at the rim of a neighbourhood miss neighbours and are not judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from alphastomics.nn import nearest_neighbours
from alphastomics.train.clocks import SMALLEST, keyed_rng

if TYPE_CHECKING:
    from torch import Tensor

    from alphastomics.data import Batch
    from alphastomics.diffusion import CosineSchedule
    from alphastomics.nn import PackingNetwork

SWITCH = 3.0  # noise, in spacings, below which packing says where cells are
LOWEST, HIGHEST = 0.03, 6.0  # noise levels of training, in spacings
RIM = 2.5  # spacings
PURPOSE = 10


def smallest_time(schedule: CosineSchedule, spacing: float) -> float:
    """Smallest time of positions that the denoiser is trained for, with cells ``spacing`` apart; packing goes on from there."""
    return max(SMALLEST, schedule.time_of_ratio(SWITCH * spacing / 2)) if spacing else SMALLEST


def packing_losses(network: PackingNetwork, batch: Batch, spacing: float, purpose: int) -> Tensor:
    """Loss of each context's neighbourhood, (B,); ``spacing`` in model units."""
    keys = batch.key.cpu().numpy()
    losses = [
        _packing_loss(network, patch[patch.isfinite().all(-1)] / spacing, keyed_rng(key, PURPOSE + purpose))
        for patch, key in zip(batch.patch, keys, strict=True)
    ]
    return torch.stack(losses)


def _packing_loss(network: PackingNetwork, x: Tensor, rng: np.random.Generator) -> Tensor:
    r = float(np.exp(rng.uniform(np.log(LOWEST), np.log(HIGHEST))))
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32)).to(x.device)
    radius = x.norm(dim=1)
    inner = radius < radius.max() - RIM - r if len(x) else radius > 0
    if int(inner.sum()) < 2:
        return x.new_zeros(())
    y = x + r * noise
    estimate = network(y, torch.tensor(r, device=x.device), nearest_neighbours(y, network.n_neighbours))
    return ((estimate - x)[inner] ** 2).mean() / r**2
