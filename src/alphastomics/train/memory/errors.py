"""The error for a step of training that runs out of memory."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import torch

from alphastomics._io._errors import describe_error

if TYPE_CHECKING:
    from alphastomics.train.memory.estimate import MemoryEstimate
    from alphastomics.train.memory.layout import BatchLayout

MESSAGES = ("out of memory", "outofmemoryerror", "can't allocate memory", "not enough memory")  # of PyTorch


class NotEnoughMemoryError(torch.OutOfMemoryError, MemoryError):
    """Memory ran out in a step of training; the message names arguments that reduce it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error).lower() for message in MESSAGES)


def free_traceback_frames(error: BaseException) -> None:
    """Free the tensors that the frames of an error's traceback reference."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def out_of_memory_error(
    layout: BatchLayout, estimate: MemoryEstimate | None, error: BaseException
) -> NotEnoughMemoryError:
    """The error for a step that ran out of memory, from its sizes, its estimate if there is one, and the error of PyTorch."""
    size, micro_batch = layout.context_size, layout.micro_batch_size
    estimated = "" if estimate is None else f", estimated to take {estimate}"
    return NotEnoughMemoryError(
        f"Memory ran out in a step with contexts of {size:,} cells and {micro_batch:,} cells at once{estimated} "
        f"({describe_error(error)}). Pass recompute='all', a smaller micro_batch_size= or context_size=, or a smaller "
        "memory_budget=; estimate_memory() estimates each. A training with a checkpoint continues with resume='last'."
    )
