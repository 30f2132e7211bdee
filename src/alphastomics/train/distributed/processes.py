r"""Communication between the processes of a training, and groups of processes that share contexts.

The cells of a context are split over the S processes of a group:

.. math:: \text{group of rank } r = \lfloor r / S \rfloor, \qquad \text{number of groups} = W / S

The processes of a group read the same contexts, draw the same noise and compute the same losses. Each runs the blocks of the
network on its own cells, see :mod:`alphastomics.nn.parallel`. Gradients are averaged over all W processes, which equals the mean
over the groups; contexts are counted once per group.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from alphastomics.nn._torch_compat import default_store
from alphastomics.nn.parallel import SINGLE_PROCESS, SequenceParallel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import lightning.pytorch as pl
    from torch import Tensor

WAIT = timedelta(minutes=10)  # for rank 0 to write
_written = Counter[str]()


def sum_over_processes(trainer: pl.Trainer, value: Tensor) -> Tensor:
    """Sum of a value over the processes."""
    if trainer.world_size == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)  # Lightning's `reduce` adds a barrier
    return total


def mean_over_processes(trainer: pl.Trainer, value: Tensor) -> Tensor:
    """Mean of a value over the processes."""
    return value if trainer.world_size == 1 else sum_over_processes(trainer, value) / trainer.world_size


def weighted_mean_over_processes(
    trainer: pl.Trainer, values: Mapping[str, Tensor], counts: Tensor
) -> dict[str, Tensor]:
    """Means of values by name over the processes, weighted by ``counts``; all processes must pass the same names."""
    if trainer.world_size == 1 or not values:
        return dict(values)
    weight = counts.float()
    local = torch.stack([value.float() for value in values.values()]) * weight
    *means, total = mean_over_processes(trainer, torch.cat([local, weight[None]])).unbind()
    return {name: mean / total.clamp_min(1e-9) for name, mean in zip(values, means, strict=True)}


def gather_objects(trainer: pl.Trainer, value: Any) -> list[Any]:
    """The values of all processes, in the order of their ranks."""
    if trainer.world_size == 1 or not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(values, value)
    return values


def write_on_rank_zero(path: Path, write: Callable[[], None]) -> None:
    """Write a file on rank 0; the other processes wait until it is written.

    All processes call this equally often with the same path. Rank 0 does not wait for the others, because a script may call
    this on rank 0 alone.

    Raises
    ------
    OSError
        In the other processes, if rank 0 could not write the file, or has not within ten minutes.
    """
    if not dist.is_initialized():
        write()
        return
    store = default_store()
    _written[str(path)] += 1
    key = f"alphastomics/{path}/{_written[str(path)]}"
    if dist.get_rank() == 0:
        problem = "the process was interrupted"
        try:
            write()
            problem = ""
        except Exception as error:
            problem = str(error)
            raise
        finally:
            store.set(key, problem)
        return
    try:
        store.wait([key], WAIT)
        problem = store.get(key).decode()
    except RuntimeError as error:
        problem = "" if path.exists() else f"no response ({error})"
    if problem:
        raise OSError(f"{path} was not written by rank 0: {problem}")


def check_group_size(size: int, n_processes: int) -> None:
    """Raise ``ValueError`` if the processes cannot be divided into groups of ``size``."""
    if size < 1:
        raise ValueError(f"context_parallel_size={size} must be at least 1")
    if n_processes % size:
        found = "there is 1 process" if n_processes == 1 else f"there are {n_processes} processes"
        raise ValueError(
            f"context_parallel_size={size} needs a multiple of {size} processes, but {found}; pass another devices=, "
            "num_nodes= or context_parallel_size="
        )


def group_index(trainer: pl.Trainer | None, size: int) -> tuple[int, int]:
    """Index of the group of this process, and number of groups of ``size`` processes."""
    return (0, 1) if trainer is None else (trainer.global_rank // size, trainer.world_size // size)


def join_group(trainer: pl.Trainer, size: int) -> SequenceParallel:
    """The group of this process; all processes must call. Raises the error of :func:`check_group_size`."""
    check_group_size(size, trainer.world_size)
    if size == 1:
        return SINGLE_PROCESS
    groups = [dist.new_group(list(range(i, i + size))) for i in range(0, trainer.world_size, size)]
    return SequenceParallel(groups[group_index(trainer, size)[0]])
