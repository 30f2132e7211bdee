r"""Random numbers of the network in training, from one generator for each context.

.. math:: u_{bi} \sim G_b, \qquad i = 1, \dots, n_b

with :math:`n_b` the number of real cells of context b. The numbers of a context depend neither on the batches and processes
among which contexts are divided nor on padding. A process with some of the cells of a context draws the numbers of all of
them. Without generators, the global generator of PyTorch is used.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Generator, Tensor

_current: ContextGenerators | None = None  # not thread-local: autograd recomputes in its own threads


class ContextGenerators:
    """A generator for each context of a batch, whose state advances with every draw.

    Parameters
    ----------
    generators
        One for each of B contexts, on the device of the network.
    n_cells
        Number of real cells of each context; they come before padding.
    start
        Index of the first cell in the input of the network.
    """

    def __init__(self, generators: Sequence[Generator], n_cells: Sequence[int], start: int = 0) -> None:
        self.generators, self.n_cells, self.start = list(generators), list(n_cells), start

    @classmethod
    def seeded(cls, seeds: Sequence[int], n_cells: Sequence[int], device: torch.device) -> ContextGenerators:
        """New generators from a number for each context."""
        return cls([torch.Generator(device).manual_seed(seed) for seed in seeds], n_cells)

    def copy(self) -> ContextGenerators:
        """Copy of the generators in the same state."""
        copies = [torch.Generator(each.device).set_state(each.get_state()) for each in self.generators]
        return ContextGenerators(copies, self.n_cells, self.start)

    def starting_at(self, start: int) -> ContextGenerators:
        """The same generators, for an input that begins at cell ``start``."""
        return ContextGenerators(self.generators, self.n_cells, start)

    def draw(self, how: Callable[..., Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Draw (B, N, C) with ``how``, ``torch.rand`` or ``torch.randn``; 0 for padding."""
        device = self.generators[0].device
        drawn = torch.zeros(*shape, dtype=dtype, device=device)
        for row, generator, n in zip(drawn, self.generators, self.n_cells, strict=True):
            values = how(n, shape[2], generator=generator, dtype=dtype, device=device)
            local = values[self.start : self.start + shape[1]]
            row[: len(local)] = local
        return drawn


@contextmanager
def drawing_from(generators: ContextGenerators | None) -> Iterator[None]:
    """Draw from ``generators`` while the context is open."""
    global _current
    before, _current = _current, generators
    try:
        yield
    finally:
        _current = before


def drawing_again() -> AbstractContextManager[None]:
    """Context that repeats the draws that follow this call, for activation checkpointing."""
    return nullcontext() if _current is None else drawing_from(_current.copy())


def drawing_for_cells(start: int) -> AbstractContextManager[None]:
    """Context in which the input of the network begins at cell ``start``; other processes hold the other cells."""
    return nullcontext() if _current is None else drawing_from(_current.starting_at(start))


def normal(shape: Sequence[int], real: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers (M, C) for the cells ``real`` (M,), by default all B N, of a batch of ``shape`` (B, N, C)."""
    if _current is None:
        n_cells = shape[0] * shape[1] if real is None else len(real)
        return torch.randn(n_cells, shape[2], dtype=dtype, device=device)
    drawn = _current.draw(torch.randn, shape, dtype).flatten(0, 1)
    return drawn if real is None else drawn.index_select(0, real)


class Dropout(nn.Module):
    """In training, set entries of (B, N, C) to 0 with probability ``rate`` and multiply the others by 1 / (1 - rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def extra_repr(self) -> str:
        """Show the rate."""
        return f"rate={self.rate}"

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        if not self.training or self.rate == 0:
            return x
        if _current is None:
            return F.dropout(x, self.rate)
        dropped = _current.draw(torch.rand, x.shape, torch.float32) < self.rate
        return x.masked_fill(dropped, 0.0) / (1 - self.rate)
