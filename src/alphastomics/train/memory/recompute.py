r"""Recompute (activation checkpointing): blocks store only their input, and run again in the backward pass.

.. math::

    k^\star = \min \{k : \operatorname{peak}(N, k) \le M\}, \qquad
    N^\star = \max \{N : \operatorname{peak}(N, D) \le M\}

(Chen et al. 2016.) The first k of D blocks are recomputed, M bytes may be used, and a context has N cells. :math:`k^\star` is
found by bisection, because the peak decreases with k, but not linearly. If D blocks are not enough, :math:`N^\star` is the
number of cells that would fit. Blocks repeat their random draws, so that the loss and its gradient, dropout included, are
those of training without recompute.
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from alphastomics.nn.random import drawing_again

Peak = Callable[[int, int], int]  # cells of a context and recomputed blocks -> bytes

COARSE = 64  # the longest context that fits is found to within 1 / COARSE of the one that does not


@contextmanager
def recompute(blocks: Iterable[nn.Module], k: int) -> Iterator[None]:
    """Recompute the first ``k`` of ``blocks`` in the backward pass within the context.

    The blocks keep their names, parameters and hooks. A block that is used at several depths is recomputed at all of them.
    Entries that a block appends to a list among its arguments are not appended a second time.
    """
    chosen = list(dict.fromkeys(islice(blocks, k)))
    for block in chosen:
        block.forward = _recomputed(block.forward)  # an instance attribute, which hides the method of the class
    try:
        yield
    finally:
        for block in chosen:
            del block.forward


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | UserList)]
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _replay_draws(lists, drawing_again())),
            **kwargs,
        )

    return run


@contextmanager
def _replay_draws(lists: list[list[Any] | UserList[Any]], draws: AbstractContextManager[None]) -> Iterator[None]:
    """Repeat the random draws, and remove entries that the block appends to lists a second time."""
    lengths = [len(values) for values in lists]
    try:
        with draws:
            yield
    finally:
        for values, length in zip(lists, lengths, strict=True):
            del values[length:]


def largest_fitting(fits: Callable[[int], bool], highest: int, *, tolerance: int = 1) -> int:
    """The largest of 1, ..., ``highest`` that fits, by bisection; 0 if none does.

    If a number fits, all smaller ones must fit. The result is less than ``tolerance`` below the largest number that fits.
    """
    low, high = 0, highest + 1  # low fits, high does not
    while high - low > tolerance or (low == 0 and high > 1):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputePolicy:
    """Recomputes as few of ``n_blocks`` blocks as a ``budget`` in bytes allows; both must be positive."""

    n_blocks: int
    budget: int

    def __post_init__(self) -> None:
        for name in ("n_blocks", "budget"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def choose(self, peak: Peak, n_cells: int) -> int:
        """The smallest k that fits for contexts of ``n_cells`` cells, after about log2(D) + 1 estimates ``peak``.

        Raises ``ValueError`` if k = D does not fit, with the number of cells that would.
        """
        if peak(n_cells, 0) <= self.budget:
            return 0
        low, high = 0, self.n_blocks  # low does not fit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if peak(n_cells, middle) <= self.budget else (middle, high)
        if high == self.n_blocks:
            needed = peak(n_cells, high)
            if needed > self.budget:
                raise ValueError(self.too_long(n_cells, needed, high, self.longest(peak, n_cells)))
        return high

    def longest(self, peak: Peak, n_cells: int) -> int:
        """The largest number of cells below ``n_cells`` that fits with all blocks recomputed, to within 1/64; 0 if none."""
        return largest_fitting(
            lambda n: peak(n, self.n_blocks) <= self.budget, n_cells - 1, tolerance=max(1, n_cells // COARSE)
        )

    def too_long(self, n_cells: int, needed: int, k: int, longest: int) -> str:
        """Message for a context that needs ``needed`` bytes with ``k`` recomputed blocks, if ``longest`` cells would fit."""
        return (
            f"A context of {n_cells:,} cells needs {needed / 2**30:.2f} GiB with {k} of {self.n_blocks} blocks recomputed, and "
            f"{self.budget / 2**30:.2f} GiB may be used: "
            + (f"{longest:,} cells would fit" if longest else "not even one cell would fit")
        )
