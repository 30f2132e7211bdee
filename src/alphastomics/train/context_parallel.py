r"""Groups of processes that share contexts: the cells of each are split over the S processes of a group.

.. math:: \text{group of rank } r = \lfloor r / S \rfloor, \qquad \text{number of groups} = W / S

The processes of a group read the same contexts, draw the same noise and compute the same losses, of a network whose blocks each
of them runs on its own cells, see :mod:`alphastomics.nn.parallel`. Gradients are averaged over all W processes. So whatever is
counted in contexts is counted over the groups, and a mean over all processes is one over the groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from alphastomics.nn.parallel import ALONE, SequenceParallel

if TYPE_CHECKING:
    import lightning.pytorch as pl


def check_groups(size: int, n_processes: int) -> None:
    """Refuse groups of ``size`` into which the processes cannot be divided.

    Raises
    ------
    ValueError
        If the size is not positive, or no divisor of the number of processes.
    """
    if size < 1:
        raise ValueError(f"context_parallel_size={size} counts processes: at least 1")
    if n_processes % size:
        there = "there is 1 process" if n_processes == 1 else f"there are {n_processes} processes"
        raise ValueError(
            f"context_parallel_size={size} needs a multiple of {size} processes, and {there}: pass another devices= or "
            "num_nodes=, or a size that divides them"
        )


def group_of(trainer: pl.Trainer | None, size: int) -> tuple[int, int]:
    """Number of the group of this process, and how many groups of ``size`` there are."""
    return (0, 1) if trainer is None else (trainer.global_rank // size, trainer.world_size // size)


def join_group(trainer: pl.Trainer, size: int) -> SequenceParallel:
    """The group of this process; all processes must call.

    Raises
    ------
    ValueError
        As for :func:`check_groups`.
    """
    check_groups(size, trainer.world_size)
    if size == 1:
        return ALONE
    groups = [dist.new_group(list(range(i, i + size))) for i in range(0, trainer.world_size, size)]
    return SequenceParallel(groups[group_of(trainer, size)[0]])
