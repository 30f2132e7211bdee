"""Memory that runs out in the midst of a training, of a GPU or of the machine: what is said, and what is let go."""

from __future__ import annotations

import traceback

import torch

WORDS = ("out of memory", "outofmemoryerror", "can't allocate memory", "not enough memory")  # of PyTorch, on any device


class NotEnoughMemoryError(torch.OutOfMemoryError, MemoryError):
    """The memory was not enough for a step of training; the message says what takes less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in WORDS)


def let_go(error: BaseException) -> None:
    """Free what the frames hold in which memory ran out: the model is to be used after them."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
