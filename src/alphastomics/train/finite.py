"""Check that the gradients of a training are finite, without waiting for the device.

The optimizer skips a step with a gradient that is not finite on the device (``found_inf`` of fused AdamW). The number of the first such step
is copied to the CPU without synchronization: a CPU reads it at once, and a GPU in a later step.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

N_REMEMBERED = 64  # steps whose slices are stored; a GPU is not that many steps behind


class FiniteCheck:
    """The first step of a training in a single process whose gradient was NaN or infinite.

    Parameters
    ----------
    device
        Device of the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._first = torch.full((), -1, dtype=torch.int32, device=device)
        self._read = torch.full((), -1, dtype=torch.int32, pin_memory=self._on_gpu)
        self._slices: deque[tuple[int, Tensor | None]] = deque(maxlen=N_REMEMBERED)

    def add(self, step: int, norm: Tensor, slice_index: Tensor | None = None) -> Tensor:
        """Add the norm of the gradient of a step; returns ``found_inf`` for the optimizer.

        ``slice_index`` (B,) are the slices of its contexts.
        """
        broken = ~norm.detach().isfinite()
        self._first.copy_(torch.where(broken & (self._first < 0), step, self._first))
        self._read.copy_(self._first, non_blocking=self._on_gpu)
        self._slices.append((step, slice_index))
        return broken.float()

    @property
    def first(self) -> int | None:
        """Number of the first step that was not finite, as far as it has been copied; None: none."""
        number = int(self._read)
        return None if number < 0 else number

    def slices_of(self, step: int) -> set[int]:
        """Slices of the contexts of a recent step."""
        return {int(i) for number, index in self._slices if number == step and index is not None for i in index}
