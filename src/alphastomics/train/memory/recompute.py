r"""Recompute (activation checkpointing): blocks store only their input, and run again in the backward pass.

The first k blocks are recomputed (Chen et al. 2016). Blocks repeat their random draws, so that the loss and its gradient,
dropout included, are those of training without recompute.
"""

from __future__ import annotations

from collections import UserList
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from alphastomics.nn.random import drawing_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


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
