r"""Networks of two layers, each for a group of rows of its own, without a loop in the graph of autograd.

.. math:: y_r = \operatorname{GELU}(x_r W^1_{e(r)} + b^1_{e(r)}) W^2_{e(r)} + b^2_{e(r)}

Groups of equal size run in batched products. Others run one after another within one node of the graph: a group stays
in the cache through both layers, and no gradient as large as all weights is filled for each group, as autograd would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Multiplications in the time that it takes to start one product: about 10 us on a thread, 5 us on a GPU (an estimate).
START_OF_THREAD, START_OF_GPU = 750_000, 100_000_000


def grouped_networks(
    rows: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor, counts: Sequence[int]
) -> Tensor:
    """Each group of rows through its network.

    Parameters
    ----------
    rows
        x, (R, d), sorted by group.
    weight_1, bias_1
        First layer, (E, d, h) and (E, h). A group without rows gets a gradient of 0.
    weight_2, bias_2
        Second layer, (E, h, d_out) and (E, d_out).
    counts
        Rows of each group, E numbers with the sum R.

    Returns
    -------
    y, (R, d_out), in the precision of autocast if that is on.
    """
    if min(counts) == max(counts):
        blocks = rows.view(len(counts), counts[0], rows.shape[1])
        hidden = F.gelu(torch.baddbmm(bias_1[:, None], blocks, weight_1))
        return torch.baddbmm(bias_2[:, None], hidden, weight_2).flatten(0, 1)
    tensors = [rows, weight_1, bias_1, weight_2, bias_2]
    device = rows.device.type
    if torch.is_autocast_enabled(device) and rows.dtype != torch.float64:
        tensors = [value.to(torch.get_autocast_dtype(device)) for value in tensors]
    y: Tensor = _GroupedNetworks.apply(*tensors, list(counts))
    return y


def even_counts(counts: Sequence[int], per_row: int, device: torch.device) -> list[int]:
    """Rows to give to each group: the same to all if running the rows that this adds costs less than starting each group.

    ``per_row`` is the number of multiplications that one layer does for a row.
    """
    start = START_OF_THREAD * torch.get_num_threads() if device.type == "cpu" else START_OF_GPU
    even = [max(counts)] * len(counts)
    return even if (sum(even) - sum(counts)) * per_row <= len(counts) * start else list(counts)


class _GroupedNetworks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor, counts: list[int]
    ) -> Tensor:
        y = rows.new_empty(len(rows), weight_2.shape[2])
        kept = []
        groups = zip(rows.split(counts), weight_1, bias_1, weight_2, bias_2, y.split(counts), strict=True)
        for x, w_1, b_1, w_2, b_2, y_e in groups:
            before = torch.addmm(b_1, x, w_1)
            after = F.gelu(before)
            torch.addmm(b_2, after, w_2, out=y_e)
            kept += [before, after]
        ctx.save_for_backward(rows, weight_1, weight_2, *kept)
        ctx.counts = counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_1, weight_2, *kept = ctx.saved_tensors
        of_rows, of_1, of_2 = (torch.empty_like(value) for value in (rows, weight_1, weight_2))
        of_b_1, of_b_2 = (value.new_empty(len(value), value.shape[2]) for value in (weight_1, weight_2))
        cut = (value.split(ctx.counts) for value in (grad.contiguous(), rows, of_rows))
        groups = zip(*cut, kept[::2], kept[1::2], weight_1, of_1, of_b_1, weight_2, of_2, of_b_2, strict=True)
        for g, x, of_x, before, after, w_1, of_w_1, b_1, w_2, of_w_2, b_2 in groups:
            torch.mm(after.T, g, out=of_w_2)
            torch.sum(g, dim=0, out=b_2)
            g_hidden = torch.ops.aten.gelu_backward(g @ w_2.T, before)
            torch.mm(x.T, g_hidden, out=of_w_1)
            torch.sum(g_hidden, dim=0, out=b_1)
            torch.mm(g_hidden, w_1.T, out=of_x)
        return of_rows, of_1, of_b_1, of_2, of_b_2, None
