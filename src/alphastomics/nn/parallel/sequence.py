r"""Splitting and gathering the cells of a context over the processes of a group.

.. math::

    \operatorname{split}(x)_r = [x;\, 0]_{rn \,:\, (r+1)n}, \qquad
    \operatorname{gather}(x_0, \dots, x_{W-1}) = [x_0; \dots; x_{W-1}]_{0 : N}, \qquad n = \lceil N / W \rceil

Every process holds n cells. If W does not divide N, the last cells are padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from alphastomics.nn.parallel import collectives

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup


class SequenceParallel:
    """Split and gather cells; :mod:`alphastomics.nn.parallel` describes the gradients.

    Parameters
    ----------
    group
        Processes that share a context, ``torch.distributed.group.WORLD`` for all. None is a single process: nothing is split,
        and no process group is needed.

    Attributes
    ----------
    rank, world_size
        Rank r of this process in the group, and number W of processes.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)

    def split(self, x: Tensor, dim: int = 1) -> Tensor:
        """Take the n cells of this process from ``x``, which is whole on all processes; N on axis ``dim`` becomes n.

        Padding is 0, or False: split the mask as well, or a mask of ones if there is none.
        """
        n = -(-x.shape[dim] // self.world_size)
        start = min(self.rank * n, x.shape[dim])
        local = x.narrow(dim, start, min(n, x.shape[dim] - start))
        shape = list(local.shape)
        shape[dim] = n - local.shape[dim]
        return torch.cat([local, local.new_zeros(shape)], dim) if shape[dim] else local

    def gather(self, x: Tensor, n_cells: int | None = None, dim: int = 1) -> Tensor:
        """Concatenate the cells of all processes; n on axis ``dim`` becomes N = ``n_cells``, or W n if it is None."""
        whole = x if self.world_size == 1 else torch.cat(collectives.gather(x, self.group).unbind(), dim)
        return whole if n_cells is None else whole.narrow(dim, 0, n_cells)

    def first(self, x: Tensor, n_cells: int, dim: int = 1) -> Tensor:
        """Gather the first ``n_cells`` cells of all, at most N, on every process."""
        return self.gather(x.narrow(dim, 0, min(n_cells, x.shape[dim])), n_cells, dim)

    def every(self, x: Tensor, stride: int) -> Tensor:
        """Take every ``stride``-th of all cells from ``x`` (B, n, ...): those of this process, and padding up to the size n / ``stride``."""
        n = x.shape[1]
        own = x[:, -(self.rank * n) % stride :: stride]
        missing = -(-n // stride) - own.shape[1]
        return torch.cat([own, own.new_zeros(own.shape[0], missing, *own.shape[2:])], 1) if missing else own

    def resplit(self, x: Tensor, *, whole: int, split: int) -> Tensor:
        """Gather the axis ``split`` and split the axis ``whole``, a multiple of W, over the processes instead."""
        if self.world_size == 1:
            return x
        parts = collectives.exchange(torch.stack(x.chunk(self.world_size, whole)), self.group)
        return torch.cat(parts.unbind(), split)

    def sum_over_cells(self, x: Tensor) -> Tensor:
        """Sum ``x``, already summed over the cells of each process, over the processes."""
        return collectives.total(x, self.group)


SINGLE_PROCESS = SequenceParallel()  # a single process with all cells
