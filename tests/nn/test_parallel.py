"""Cells split over processes against dense arithmetic on one, outputs and gradients.

This file is also the program that the processes run: ``python test_parallel.py FOLDER RANK WORLD_SIZE`` works through
the cases of one number of processes and leaves its results in the folder, for the tests to read.
"""

from __future__ import annotations

import datetime
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from alphastomics.nn.attention import SoftmaxAttention
from alphastomics.nn.parallel import SequenceParallel, attention, split_attention
from alphastomics.nn.parallel.ring import attend, attend_backward, attend_by_rows, attend_by_rows_backward, ring

if TYPE_CHECKING:
    from torch import Tensor

EXCHANGES = {"ulysses": attention.ulysses, "ring": ring}
every_kind = pytest.mark.parametrize("kind", EXCHANGES)
TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 3e-2}


def attend_by(kind: str, *arguments: Any) -> Tensor:
    """Attention by one of the exchanges, whatever the number of heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "choose_exchange", lambda *_: EXCHANGES[kind])
        return split_attention(*arguments)


class Case(NamedTuple):
    """One attention problem."""

    kind: str
    n_heads: int
    n_cells: int
    masked: bool
    dtype: str
    d_value: int = 4


def cases(world_size: int) -> list[Case]:
    """Ulysses with H = 2 W, the ring with an H that W does not divide too; N even, odd, and smaller than W."""
    heads = {"ulysses": (2 * world_size,), "ring": (2 * world_size, world_size + 1)}
    sizes = (1, 7, 8) if world_size == 2 else (2, 7)
    found = [
        Case(kind, h, n, masked, dtype)
        for kind, hs in heads.items()
        for h, n, masked, dtype in itertools.product(hs, sizes, (False, True), ("float32", "float64"))
    ]
    wide = [Case(kind, heads[kind][0], 7, True, "float64", 9) for kind in heads]
    return found + wide + [Case(kind, heads[kind][0], 7, True, "bfloat16") for kind in heads]


def name(case: Case) -> str:
    mask = "masked" if case.masked else "full"
    return f"{case.kind}-H{case.n_heads}-N{case.n_cells}-{mask}-{case.dtype}-v{case.d_value}"


def problem(case: Case) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k and v, the derivative of the loss by the output, and the mask, all whole and in float64."""
    g = torch.Generator().manual_seed(case.n_cells)
    b, h, n = 2, case.n_heads, case.n_cells
    q, k, v, w = (torch.randn(b, h, n, d, generator=g, dtype=torch.float64) for d in (4, 4, *2 * [case.d_value]))
    mask = torch.ones(b, n, dtype=torch.bool)
    if case.masked:
        mask[0, 1::3] = False
        mask[1, : n // 2] = False  # the first process has padding alone
    return [q, k, v], w, mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask[:, None, None, :], -torch.inf)
    return (s.softmax(-1) @ v).masked_fill(~mask[:, None, :, None], 0.0)


def on_processes(case: Case, parallel: SequenceParallel) -> list[Tensor]:
    """Output and gradients of the cells of this process, in float64."""
    qkv, w, mask = problem(case)
    dtype = getattr(torch, case.dtype)
    local = [parallel.split(x, 2).to(dtype).requires_grad_() for x in qkv]
    o = attend_by(case.kind, *local, parallel.split(mask), parallel)
    assert o.dtype == dtype
    (o * parallel.split(w, 2).to(dtype)).sum().backward()
    return [x.detach().double() for x in (o, *(x.grad for x in local))]


@given(n=st.integers(1, 40), world_size=st.integers(1, 4), stride=st.integers(1, 5))
def test_keys_are_those_of_a_single_process(n, world_size, stride):
    x = torch.arange(1.0, n + 1).expand(2, n)
    keys, real = [], []
    for rank in range(world_size):
        parallel = SequenceParallel()
        parallel.rank, parallel.world_size = rank, world_size
        keys.append(parallel.every(parallel.split(x), stride))
        real.append(parallel.every(parallel.split(torch.ones_like(x, dtype=torch.bool)), stride))
    assert len({part.shape for part in keys}) == 1
    assert torch.equal(torch.cat(keys, 1)[torch.cat(real, 1)].view(2, -1), x[:, ::stride])


# -- a network ---------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Weights before the split, on split cells, and after the gathering; a loss of cells and one of pairs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.attention, self.out = nn.Linear(3, 8), SoftmaxAttention(8, 4), nn.Linear(8, 2)

    def attend(self, h: Tensor, mask: Tensor, parallel: SequenceParallel | None) -> Tensor:
        if parallel is None:
            return self.attention(h, mask=mask)
        o = split_attention(*self.attention.heads(h), mask, parallel).transpose(1, 2)
        return self.attention.out((o * self.attention.gates(h)[..., None]).flatten(2))

    def forward(self, x: Tensor, mask: Tensor, parallel: SequenceParallel | None) -> Tensor:
        """Mean loss of the contexts; without ``parallel``, written as if there were no such thing."""
        h, own, total, whole = self.embed(x), mask, lambda part: part, lambda part: part
        attended = self.attend
        if parallel is not None:
            h, own = parallel.split(h), parallel.split(mask)
            total, whole = parallel.sum_over_cells, lambda part: parallel.gather(part, x.shape[1])
            attended = partial(checkpoint, self.attend, use_reentrant=False)  # long contexts recompute
        y = (h + attended(h, own, parallel)) * own[..., None]
        per_cell = total((y**2).sum((1, 2))) / total(own.sum(1).to(y.dtype))
        core = torch.einsum("bkr,bks->brs", y, y)  # as in a triangle contraction
        position = self.out(whole(y)) * mask[..., None]
        pairs = torch.einsum("bid,bjd->bij", position, position)
        return (per_cell + total(core).square().mean((1, 2)) + pairs.square().mean((1, 2))).mean()


def contexts(n_cells: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(2, n_cells, 3, generator=g, dtype=dtype)
    return x, torch.arange(n_cells) < torch.tensor([n_cells, 3])[:, None]


def gradients(network: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in network.parameters()]


def train_on_processes(n_cells: int, dtype: torch.dtype) -> list[Tensor]:
    """Loss, and gradients as DDP leaves them; with four processes, two pairs have one context each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group, mine = dist.group.WORLD, slice(None)
    if world_size == 4:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group, mine = groups[rank // 2], slice(rank // 2, rank // 2 + 1)
    network = DistributedDataParallel(Network().to(dtype))
    x, mask = contexts(n_cells, dtype)
    loss = network(x[mine], mask[mine], SequenceParallel(group))
    loss.backward()
    return [loss.detach(), *gradients(network)]


# -- what the processes do ---------------------------------------------------------------------------------------------


def collectives_on_processes(parallel: SequenceParallel) -> dict[str, list[Tensor]]:
    found = {}
    for n, dim in itertools.product((1, 5, 6), (1, 2)):
        x = torch.arange(2.0 * n * 3).view((2, n, 3) if dim == 1 else (2, 3, n)).requires_grad_()
        part = parallel.split(x, dim)
        y = parallel.gather(part, n, dim)
        (y * (parallel.rank + 1) * x.detach()).sum().backward()
        found[f"round-{n}-{dim}"] = [y.detach(), x.grad, part.detach()]
    mask = torch.tensor([[True, False, True], [False, True, True]])
    found["mask"] = [parallel.gather(parallel.split(mask), 3), parallel.split(mask)]
    x = torch.tensor([1.0, 10.0])[parallel.rank].requires_grad_()
    parallel.sum_over_cells(x).pow(2).mul(parallel.rank + 1).backward()
    found["sum"] = [parallel.sum_over_cells(x).detach(), x.grad]
    return found


def empty_context_on_processes(parallel: SequenceParallel) -> dict[str, list[Tensor]]:
    """One context of padding that holds no numbers, beside one of cells."""
    found = {}
    for kind in EXCHANGES:
        q, k, v = (torch.ones(2, 2, 3, 4).requires_grad_() for _ in range(3))
        mask = torch.tensor([[False] * 3, [True] * 3])
        rubbish = torch.where(mask, 1.0, torch.nan)[:, None, :, None]
        o = attend_by(kind, q * rubbish, k * rubbish, v, mask, parallel)
        found[f"empty-{kind}"] = [o.detach(), *torch.autograd.grad(o.sum(), (q, k, v))]
    return found


def subgroup_on_processes(case: Case) -> dict[str, list[Tensor]]:
    """Processes 1 and 2 of three share a context."""
    group = dist.new_group([1, 2])
    return {"subgroup": on_processes(case, SequenceParallel(group)) if dist.get_rank() else []}


SUBGROUP = Case("ring", 3, 7, True, "float64")


def work(folder: Path, rank: int, world_size: int) -> None:
    wait = datetime.timedelta(minutes=2)
    meet = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size, timeout=wait)
    parallel, found = SequenceParallel(dist.group.WORLD), {}
    if world_size == 2:
        found |= collectives_on_processes(parallel) | empty_context_on_processes(parallel)
    if world_size == 3:
        found |= subgroup_on_processes(SUBGROUP)
    if world_size < 4:
        found |= {name(case): on_processes(case, parallel) for case in cases(world_size)}
    for n_cells, dtype in itertools.product((6, 7), (torch.float32, torch.float64)):
        found[f"train-{n_cells}-{dtype}"] = train_on_processes(n_cells, dtype)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()  # a process that leaves first breaks the connections of the others
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(run_ranks, tmp_path_factory) -> list[dict[str, list[Tensor]]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def three(run_ranks, tmp_path_factory) -> list[dict[str, list[Tensor]]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(scope="module")
def four(run_ranks, tmp_path_factory) -> list[dict[str, list[Tensor]]]:
    return run_ranks(__file__, tmp_path_factory.mktemp("four"), 4)


# -- attention ---------------------------------------------------------------------------------------------------------


def check(case: Case, parts: list[list[Tensor]]) -> None:
    """Outputs and gradients of all processes, put together, are those of dense attention (bar 23)."""
    qkv, w, mask = problem(case)
    qkv = [x.requires_grad_() for x in qkv]
    o = dense(*qkv, mask)
    (o * w).sum().backward()
    expected = [o.detach(), *(x.grad for x in qkv)]
    for one, *shards in zip(expected, *parts, strict=True):
        whole = torch.cat(shards, 2)
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(whole[:, :, : case.n_cells], one, atol=tolerance, rtol=tolerance)
        assert not whole[:, :, case.n_cells :].any()
        assert not whole.mT[..., : case.n_cells].mT[~mask[:, None].expand(whole.shape[:2] + mask.shape[1:])].any()


@pytest.mark.parametrize("case", cases(2), ids=name)
def test_two_processes_attend_as_one(two, case):
    check(case, [found[name(case)] for found in two])


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(3), ids=name)
def test_three_processes_attend_as_one(three, case):
    check(case, [found[name(case)] for found in three])


@pytest.mark.slow
def test_a_ring_of_some_of_the_processes_attends_as_one(three):
    check(SUBGROUP, [found["subgroup"] for found in three[1:]])


@every_kind
@pytest.mark.parametrize("n_cells", [1, 7])
def test_one_process_needs_no_group(kind, n_cells):
    case = Case(kind, 3, n_cells, n_cells > 1, "float64")
    check(case, [on_processes(case, SequenceParallel())])


@every_kind
def test_a_context_of_padding_is_zero_and_has_no_gradient(two, kind):
    for found in two:
        o, *grads = found[f"empty-{kind}"]
        assert not o[0].any()
        torch.testing.assert_close(o[1], torch.ones_like(o[1]))
        for grad in grads:
            assert bool(grad[1].isfinite().all())
        assert not grads[2][0].any()


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from(list(EXCHANGES)))
def test_neither_order_nor_what_padding_holds_matters(seed, n_cells, kind):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, n_cells, 3, generator=g, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, n_cells, generator=g) < 0.6
    order = torch.randperm(n_cells, generator=g)
    o = attend_by(kind, q, k, v, mask, SequenceParallel())
    rubbish = [torch.where(mask[:, None, :, None], x, torch.nan)[:, :, order] for x in (q, k, v)]
    again = attend_by(kind, *rubbish, mask[:, order], SequenceParallel())
    torch.testing.assert_close(again, o[:, :, order], atol=1e-12, rtol=0)


@every_kind
def test_autocast_applies_to_communicated_tensors(kind):
    q, k, v = (torch.randn(1, 2, 9, 4).requires_grad_() for _ in range(3))
    mask = torch.arange(9)[None] < 7
    with torch.autocast("cpu", torch.bfloat16):
        o = attend_by(kind, q, k, v, mask, SequenceParallel())
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o.float(), dense(q, k, v, mask), atol=3e-2, rtol=0)
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_ulysses_is_chosen_where_heads_can_be_split():
    chosen = [attention.choose_exchange(8, w) for w in (1, 2, 3, 4, 16)]
    assert chosen == [EXCHANGES[kind] for kind in ("ulysses", "ulysses", "ring", "ulysses", "ring")]


# -- parts of the keys -------------------------------------------------------------------------------------------------

KERNELS = {"kernel": (attend, attend_backward), "rows": (attend_by_rows, attend_by_rows_backward)}


@pytest.mark.parametrize("which", KERNELS)
@pytest.mark.parametrize("block", [1, 2**24])
def test_parts_of_the_keys_add_up(which, block, monkeypatch):
    """Merged with their log-sum-exp; the gradient of each part needs that of the whole alone."""
    monkeypatch.setattr("alphastomics.nn.parallel.ring.BLOCK", block)
    forward, backward = KERNELS[which]
    g = torch.Generator().manual_seed(0)
    q, k, v, w = (torch.randn(2, 2, 6, 4, generator=g, dtype=torch.float64).requires_grad_() for _ in range(4))
    s = 0.3 * q @ k.mT
    lse, o = s.logsumexp(-1), s.softmax(-1) @ v
    expected = torch.autograd.grad((o * w).sum(), (q, k, v))
    q, k, v, w, lse, o = (x.detach() for x in (q, k, v, w, lse, o))
    halves = [(k[:, :, :2], v[:, :, :2]), (k[:, :, 2:], v[:, :, 2:])]
    (o_0, lse_0), (o_1, lse_1) = (forward(q, *half, 0.3) for half in halves)
    torch.testing.assert_close(torch.logaddexp(lse_0, lse_1), lse, atol=1e-12, rtol=0)
    merged = o_0 * (lse_0 - lse).exp()[..., None] + o_1 * (lse_1 - lse).exp()[..., None]
    torch.testing.assert_close(merged, o, atol=1e-12, rtol=0)
    first, second = (backward(w, q, *half, o, lse, 0.3) for half in halves)
    torch.testing.assert_close(first[0] + second[0], expected[0], atol=1e-12, rtol=0)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([first[i], second[i]], 2), expected[i], atol=1e-12, rtol=0)


@pytest.mark.parametrize("which", KERNELS)
def test_gradient_of_the_ring(which, monkeypatch):
    for function, name in zip(KERNELS[which], ("attend", "attend_backward"), strict=True):
        monkeypatch.setattr(f"alphastomics.nn.parallel.ring.{name}", function)
    g = torch.Generator().manual_seed(1)
    qkv = [torch.randn(2, 2, 4, 3, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: ring(q, k, v, SequenceParallel(), 0.5), qkv)


# -- cells, sums, weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_cells", [1, 5, 6])
@pytest.mark.parametrize("dim", [1, 2])
def test_split_tensors_are_gathered_again(two, n_cells, dim):
    x = torch.arange(2.0 * n_cells * 3).view((2, n_cells, 3) if dim == 1 else (2, 3, n_cells))
    n = -(-n_cells // 2)
    padded = torch.cat([x, torch.zeros_like(x)], dim)
    grads = []
    for rank, found in enumerate(two):
        y, grad, part = found[f"round-{n_cells}-{dim}"]
        assert torch.equal(y, x)
        assert torch.equal(part, padded.narrow(dim, rank * n, n))
        grads.append(grad)
    # The losses of the two processes are 1 and 2 times x^2 / 2; each has the gradient of the cells that it held.
    assert torch.equal(grads[0] + grads[1], 3 * x)
    assert not grads[0].narrow(dim, n, n_cells - n).any()
    assert not grads[1].narrow(dim, 0, n).any()


def test_masks_are_split_too(two):
    mask = torch.tensor([[True, False, True], [False, True, True]])
    padded = torch.cat([mask, torch.zeros(2, 1, dtype=torch.bool)], 1)
    for rank, found in enumerate(two):
        whole, part = found["mask"]
        assert torch.equal(whole, mask)
        assert torch.equal(part, padded[:, 2 * rank : 2 * rank + 2])


def test_sums_have_gradients(two):
    for found in two:
        total, grad = found["sum"]
        assert float(total) == 11
        assert float(grad) == 2 * 11 * (1 + 2)  # both losses, 1 and 2 times the square, depend on every term


def check_training(results: list[dict[str, list[Tensor]]], n_cells: int, dtype: torch.dtype) -> None:
    network = Network().to(dtype)
    loss = network(*contexts(n_cells, dtype), None)
    loss.backward()
    losses = torch.stack([found[f"train-{n_cells}-{dtype}"][0] for found in results])
    tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(losses.mean(), loss.detach(), atol=0, rtol=tolerance)
    assert torch.equal(losses[0], losses[1])  # the processes that share a context have one loss
    for found in results:
        for actual, expected in zip(found[f"train-{n_cells}-{dtype}"][1:], gradients(network), strict=True):
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(actual, expected, atol=tolerance * float(expected.abs().max()), rtol=tolerance)


@pytest.mark.parametrize("n_cells", [6, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_get_the_gradients_of_one_process(two, n_cells, dtype):
    check_training(two, n_cells, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("n_cells", [6, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_get_the_gradients_of_one_process_through_the_ring(three, n_cells, dtype):
    check_training(three, n_cells, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("n_cells", [6, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_get_the_gradients_of_one_process_when_contexts_are_spread_as_well(four, n_cells, dtype):
    check_training(four, n_cells, dtype)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
