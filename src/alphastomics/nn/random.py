r"""Random numbers of the network in training, from one generator for each context.

.. math:: u_{bi} \sim G_b, \qquad i = 1, \dots, n_b

with :math:`n_b` the real cells of context b. A context draws the same numbers however contexts are divided into batches and
among processes, and whatever they are padded to. A process that has some of its cells draws the numbers of all. Without
generators, the global one of PyTorch is used.
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

_current: ContextGenerators | None = None  # not of a thread: autograd recomputes in threads of its own


class ContextGenerators:
    """A generator for each context of a batch, which goes on from draw to draw.

    Parameters
    ----------
    generators
        One for each of B contexts, on the device of the network.
    n_cells
        Real cells of each, which come first.
    start
        Number of the first cell that the network is given; it is given as many as it draws for.
    """

    def __init__(self, generators: Sequence[Generator], n_cells: Sequence[int], start: int = 0) -> None:
        self.generators, self.n_cells, self.start = list(generators), list(n_cells), start

    @classmethod
    def seeded(cls, seeds: Sequence[int], n_cells: Sequence[int], device: torch.device) -> ContextGenerators:
        """New generators from a number for each context."""
        return cls([torch.Generator(device).manual_seed(seed) for seed in seeds], n_cells)

    def copy(self) -> ContextGenerators:
        """Generators in the same state."""
        copies = [torch.Generator(each.device).set_state(each.get_state()) for each in self.generators]
        return ContextGenerators(copies, self.n_cells, self.start)

    def starting_at(self, start: int) -> ContextGenerators:
        """The same generators, for a network that is given the cells from ``start`` on."""
        return ContextGenerators(self.generators, self.n_cells, start)

    def draw(self, how: Callable[..., Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Values (B, N, C) by ``torch.rand`` or ``torch.randn``, 0 for padding."""
        device = self.generators[0].device
        drawn = torch.zeros(*shape, dtype=dtype, device=device)
        for row, generator, n in zip(drawn, self.generators, self.n_cells, strict=True):
            values = how(n, shape[2], generator=generator, dtype=dtype, device=device)
            own = values[self.start : self.start + shape[1]]
            row[: len(own)] = own
        return drawn


@contextmanager
def drawing_from(generators: ContextGenerators | None) -> Iterator[None]:
    """Draw from these generators while the context is open."""
    global _current
    before, _current = _current, generators
    try:
        yield
    finally:
        _current = before


def drawing_again() -> AbstractContextManager[None]:
    """A context that repeats the draws that follow this call, for blocks that are recomputed."""
    return nullcontext() if _current is None else drawing_from(_current.copy())


def drawing_for_cells(start: int) -> AbstractContextManager[None]:
    """A context in which the network runs on the cells from ``start`` on, and other processes on the rest."""
    return nullcontext() if _current is None else drawing_from(_current.starting_at(start))


def normal(shape: Sequence[int], real: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers (M, C) for the cells ``real`` (M,) among the B N of a batch, whose shape is (B, N, C); None: all."""
    if _current is None:
        n_cells = shape[0] * shape[1] if real is None else len(real)
        return torch.randn(n_cells, shape[2], dtype=dtype, device=device)
    drawn = _current.draw(torch.randn, shape, dtype).flatten(0, 1)
    return drawn if real is None else drawn.index_select(0, real)


class Dropout(nn.Module):
    """In training, entries of (B, N, C) become 0 with probability ``rate``, and the others grow by 1 / (1 - rate)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def extra_repr(self) -> str:
        """Show the rate."""
        return f"rate={self.rate}"

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C)."""
        if not self.training or self.rate == 0:
            return x
        if _current is None:
            return F.dropout(x, self.rate)
        dropped = _current.draw(torch.rand, x.shape, torch.float32) < self.rate
        return x.masked_fill(dropped, 0.0) / (1 - self.rate)
