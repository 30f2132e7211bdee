r"""Mixture of experts with noisy top-k gating (Shazeer et al., ICLR 2017), which replaces the feed-forward network.

.. math::

    s_i &= x_i W_r + \varepsilon_i \odot \operatorname{softplus}(x_i W_n), \qquad
    p_i = \operatorname{softmax}(s_i), \qquad T_i = \text{the } k \text{ largest of } p_i \\
    y_i &= \sum_{e \in T_i} w_{ie}\, f_e(x_i), \qquad
    f_e(x) = W^2_e \operatorname{GELU}(W^1_e x + b^1_e) + b^2_e \\
    w_{ie} &= p_{ie} \Big/ \sum_{e' \in T_i} p_{ie'} \;\; (k \ge 2), \qquad w_{ie} = p_{ie} \;\; (k = 1)

with :math:`\varepsilon \sim N(0, I)` in training and 0 otherwise. For k = 1 the weight is the probability itself (Fedus
et al., JMLR 2022): a renormalized weight would be 1, without a gradient for the router. The balance loss

.. math:: L_{balance} = E \sum_e f_e P_e,

with f_e the share of expert e in the assignments of real cells and P_e its mean probability in a context, encourages even
use of the experts, at which it is 1.

:func:`grouped_networks` runs all experts: groups of equal size in batched products, others one after another in one function
of autograd. A group stays in the cache through both layers, and no gradient of the size of all weights is allocated per group.
"""

from __future__ import annotations

from collections import UserList
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from alphastomics.nn.random import normal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from alphastomics.config import ExpertWidth

# Multiplications in the time of launching one matrix product: about 10 us per thread of a CPU, 5 us on a GPU (estimated).
CPU_LAUNCH_COST, GPU_LAUNCH_COST = 750_000, 100_000_000


def grouped_networks(
    rows: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor, counts: Sequence[int]
) -> Tensor:
    """Run each group of rows through its network.

    Parameters
    ----------
    rows
        x, (R, d), sorted by group.
    weight_1, bias_1
        First layer, (E, d, h) and (E, h). A group without rows gets a gradient of 0.
    weight_2, bias_2
        Second layer, (E, h, d_out) and (E, d_out).
    counts
        Number of rows in each group, E numbers with sum R.

    Returns
    -------
    y, (R, d_out), in the precision of autocast if it is enabled.
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


def padded_counts(counts: Sequence[int], per_row: int, device: torch.device) -> list[int]:
    """Rows of each group after padding: equal if running the added rows costs less than starting a product per group.

    ``per_row`` is the number of multiplications of one layer for a row.
    """
    start = CPU_LAUNCH_COST * torch.get_num_threads() if device.type == "cpu" else GPU_LAUNCH_COST
    even = [max(counts)] * len(counts)
    return even if (sum(even) - sum(counts)) * per_row <= len(counts) * start else list(counts)


class _GroupedNetworks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight_1: Tensor, bias_1: Tensor, weight_2: Tensor, bias_2: Tensor, counts: list[int]
    ) -> Tensor:
        y = rows.new_empty(len(rows), weight_2.shape[2])
        saved = []
        groups = zip(rows.split(counts), weight_1, bias_1, weight_2, bias_2, y.split(counts), strict=True)
        for x, w_1, b_1, w_2, b_2, y_e in groups:
            before = torch.addmm(b_1, x, w_1)
            after = F.gelu(before)
            torch.addmm(b_2, after, w_2, out=y_e)
            saved += [before, after]
        ctx.save_for_backward(rows, weight_1, weight_2, *saved)
        ctx.counts = counts
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_1, weight_2, *saved = ctx.saved_tensors
        grad_rows, grad_weight_1, grad_weight_2 = (torch.empty_like(value) for value in (rows, weight_1, weight_2))
        grad_bias_1, grad_bias_2 = (value.new_empty(len(value), value.shape[2]) for value in (weight_1, weight_2))
        split = (value.split(ctx.counts) for value in (grad.contiguous(), rows, grad_rows))
        first = zip(saved[::2], weight_1, grad_weight_1, grad_bias_1, strict=True)
        second = zip(saved[1::2], weight_2, grad_weight_2, grad_bias_2, strict=True)
        for g, x, grad_x, (before, w_1, grad_w_1, grad_b_1), (after, w_2, grad_w_2, grad_b_2) in zip(
            *split, first, second, strict=True
        ):
            torch.mm(after.T, g, out=grad_w_2)
            torch.sum(g, dim=0, out=grad_b_2)
            g_hidden = torch.ops.aten.gelu_backward(g @ w_2.T, before)
            torch.mm(x.T, g_hidden, out=grad_w_1)
            torch.sum(g_hidden, dim=0, out=grad_b_1)
            torch.mm(g_hidden, w_1.T, out=grad_x)
        return grad_rows, grad_weight_1, grad_bias_1, grad_weight_2, grad_bias_2, None


class Routing(NamedTuple):
    """Routing of the cells of a batch in one layer.

    Attributes
    ----------
    probability
        p, (B, N, E); 0 for padding.
    assigned
        1 for the experts assigned to a cell, else 0, (B, N, E).
    """

    probability: Tensor
    assigned: Tensor


class Routings(UserList[Routing]):
    """Routings of all layers. Not a list, because FSDP2 copies lists among the arguments of a module."""


class Experts(nn.Module):
    """E two-layer networks, k of which act on each cell.

    No cell is dropped, so that the result depends neither on padding nor on the order of the cells.

    Parameters
    ----------
    d_model, d_ff
        Width d, and hidden width of the dense network that the experts replace.
    num_experts
        E.
    top_k
        k, number of experts that act on a cell.
    width
        Hidden width of an expert: ``"split"``: d_ff / E, so that all experts are as large as the dense network; ``"full"``: d_ff.

    Raises
    ------
    ValueError
        If k is not between 1 and E, the width is unknown, or d_ff cannot be split evenly.
    """

    def __init__(self, d_model: int, d_ff: int, *, num_experts: int, top_k: int, width: ExpertWidth = "split") -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"moe_top_k={top_k} must lie between 1 and num_experts={num_experts}")
        if width not in ("split", "full"):
            raise ValueError(f"expert_width={width!r} is unknown; choose 'split' or 'full'")
        if width == "split" and d_ff % num_experts:
            raise ValueError(
                f"a width of {d_ff} cannot be split among num_experts={num_experts}; take a divisor, or "
                "expert_width='full'"
            )
        hidden = d_ff // num_experts if width == "split" else d_ff
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(d_model, num_experts, bias=False)
        self.noise = nn.Linear(d_model, num_experts, bias=False)
        nn.init.zeros_(self.noise.weight)  # initial standard deviation: log 2
        self.weight_1, self.bias_1 = _layer(num_experts, d_model, hidden)
        self.weight_2, self.bias_2 = _layer(num_experts, hidden, d_model)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Map ``x`` (B, N, d) to (B, N, d), 0 where ``mask`` (B, N) is false, and return the routing as well."""
        b, n, d = x.shape
        cells = x.reshape(-1, d)
        real = None if mask is None else mask.flatten().nonzero()[:, 0]
        if real is not None:
            cells = cells.index_select(0, real)
        noise = normal((b, n, self.num_experts), real, _routing_precision(x), x.device) if self.training else None
        probability, expert, weight = self.route(cells, noise)
        assigned = F.one_hot(expert, self.num_experts).sum(dim=1).to(probability.dtype)
        parts = [self.mix(cells, expert, weight), probability, assigned]
        if real is not None:
            parts = [part.new_zeros(b * n, part.shape[1]).index_copy(0, real, part) for part in parts]
        y, probability, assigned = (part.view(b, n, -1) for part in parts)
        return y, Routing(probability, assigned)

    def route(self, cells: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities (M, E) of ``cells`` (M, d), and the chosen experts and their weights, both (M, k).

        ``noise`` (M, E) is standard normal; None adds none.
        """
        with torch.autocast(cells.device.type, enabled=False):  # in low precision, rounding would break near ties
            cells = cells.to(_routing_precision(cells))
            score = F.linear(cells, self.router.weight.to(cells.dtype))
            if noise is not None:
                score = score + noise * F.softplus(F.linear(cells, self.noise.weight.to(cells.dtype)))
            probability = score.softmax(dim=-1)
            weight, expert = probability.topk(self.top_k, dim=-1)
            if self.top_k > 1:
                weight = weight / weight.sum(dim=-1, keepdim=True)
        return probability, expert, weight

    def mix(self, cells: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
        """Weighted sum (M, d) of the chosen experts for ``cells`` (M, d); ``expert`` and ``weight`` are (M, k)."""
        rows, place, counts = self._lay_out(expert.flatten())
        weights = (self.weight_1, self.bias_1, self.weight_2, self.bias_2)
        y = grouped_networks(cells.index_select(0, rows), *weights, counts).index_select(0, place)
        return (y.view(len(cells), self.top_k, y.shape[1]) * weight[..., None].to(y.dtype)).sum(dim=1)

    def _lay_out(self, slot: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Sort assignments (M k) by expert: the cell of each row, the row of each assignment, and the rows per expert.

        Rows that pad the groups repeat cell 0; their results are not used.
        """
        count = slot.bincount(minlength=self.num_experts)
        counts = padded_counts(count.tolist(), self.weight_1[0].numel(), slot.device)
        shift = _offsets(torch.tensor(counts, device=slot.device)) - _offsets(count)
        order, index = slot.argsort(stable=True), torch.arange(len(slot), device=slot.device)
        place = torch.empty_like(slot).index_copy_(0, order, index + shift[slot[order]])
        rows = slot.new_zeros(sum(counts)).index_copy_(0, place, index // self.top_k)
        return rows, place, counts


def _routing_precision(x: Tensor) -> torch.dtype:
    """Precision in which routing is computed."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def _offsets(count: Tensor) -> Tensor:
    return count.cumsum(0) - count


def _layer(num_experts: int, n_in: int, n_out: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weights (E, n_in, n_out) and biases (E, n_out), initialized like those of ``nn.Linear``."""
    bound = n_in**-0.5
    weight, bias = torch.empty(num_experts, n_in, n_out), torch.empty(num_experts, n_out)
    return nn.Parameter(weight.uniform_(-bound, bound)), nn.Parameter(bias.uniform_(-bound, bound))


def expert_counts(routings: Sequence[Routing], mask: Tensor) -> Tensor:
    """Number of real cells of ``mask`` (B, N) that are assigned to each expert of each layer, (L, E)."""
    return torch.stack([_per_context(routing.assigned, mask).sum(dim=0) for routing in routings]).detach()


def balance_losses(routings: Sequence[Routing], mask: Tensor, counts: Tensor | None = None) -> Tensor:
    r"""Balance loss of each context b, (B,).

    .. math:: L_b = E \sum_e f_e P_{be}, \qquad P_{be} = \operatorname{mean}_{i \in b} p_{ie}

    averaged over layers; f has no gradient.

    Parameters
    ----------
    routings
        One for each layer.
    mask
        Real cells (B, N).
    counts
        Assignments (L, E) from which f is computed; by default those of these contexts on all processes.
    """
    counts = _sum_over_processes(expert_counts(routings, mask)) if counts is None else counts
    share = counts / counts.sum(dim=-1, keepdim=True).clamp_min(1)
    probability = torch.stack([_per_context(routing.probability, mask) for routing in routings])  # (L, B, E)
    probability = probability / mask.sum(dim=1).clamp_min(1)[:, None]
    return share.shape[-1] * (share[:, None] * probability).sum(dim=-1).mean(dim=0)


def expert_usage(routing: Routing, mask: Tensor) -> Tensor:
    """Share of each expert in the assignments of real cells, (E,)."""
    count = _per_context(routing.assigned, mask).sum(dim=0)
    return count / count.sum().clamp_min(1)


def _per_context(value: Tensor, mask: Tensor) -> Tensor:
    return (value * mask[..., None]).sum(dim=1)


def _sum_over_processes(value: Tensor) -> Tensor:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(value)
    return value
