"""Triangle attention by blocks of rows against the algorithm, and what it keeps in memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from alphastomics.nn.pair import PairFactors, TriangleAttention

directions = pytest.mark.parametrize("direction", ["starting", "ending"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A few rows at a time."""
    monkeypatch.setattr("alphastomics.nn.pair.triangle.BLOCK", 5000)


def make(direction: str) -> TriangleAttention:
    torch.manual_seed(0)
    module = TriangleAttention(8, 2, direction).double()
    with torch.no_grad():
        module.qkv.weight *= 3  # attention that is far from uniform
        module.bias *= 3
    return module


def algorithm(module: TriangleAttention, p: torch.Tensor) -> torch.Tensor:
    """Algorithms 13 and 14 for one context p (N, N, C) without padding, head by head."""
    p = p / (p.square().mean((0, 1)) + 1e-6).sqrt()
    q, k, v = (p @ module.qkv.weight.mT).chunk(3, dim=-1)
    gate = (p @ module.gate.weight.mT + module.gate.bias).sigmoid()
    heads = []
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        qh, kh, vh = q[..., part], k[..., part], v[..., part]
        b = p[..., part] @ module.bias[part]
        if module.direction == "starting":
            score = torch.einsum("ijd,ikd->ijk", qh, kh) / 2 + b[None]
            heads.append(torch.einsum("ijk,ikd->ijd", score.softmax(-1), vh))
        else:
            score = torch.einsum("ijd,kjd->ijk", qh, kh) / 2 + b.mT[:, None]
            heads.append(torch.einsum("ijk,kjd->ijd", score.softmax(-1), vh))
    return (gate * torch.cat(heads, dim=-1)) @ module.out.weight.mT + module.out.bias


def projected(update: torch.Tensor, factors: PairFactors, direction: str) -> torch.Tensor:
    """Nearest features (C, N, N) with the right factors, or for the ending node the left ones."""
    update = update.permute(2, 0, 1)
    if direction == "starting":
        basis = torch.linalg.qr(factors.right[0]).Q
        return update @ basis @ basis.mT
    basis = torch.linalg.qr(factors.left[0]).Q
    return basis @ basis.mT @ update


@directions
@pytest.mark.parametrize("n_cells", [2, 5, 11])
def test_single_precision_is_enough_if_there_are_fewer_cells_than_ranks(direction, n_cells, make_factors, difference):
    module, factors = make(direction), make_factors(b=1, n=n_cells, rank=8)
    exact = module(factors).dense()
    single = module.float()(PairFactors(factors.left.float(), factors.right.float())).dense()
    assert difference(single.double(), exact) < 1e-2


@directions
@pytest.mark.parametrize("block", [1, 3000, 2**21])
def test_update_is_the_projection_of_the_algorithm(direction, block, make_factors, difference, monkeypatch):
    """Bar: 1e-10, value and gradient."""
    monkeypatch.setattr("alphastomics.nn.pair.triangle.BLOCK", block)
    module, factors = make(direction), make_factors(b=1)
    left, right = (x.requires_grad_() for x in factors[:2])
    expected = projected(algorithm(module, factors.dense()[0]), factors, direction)
    actual = module(factors).dense()[0].permute(2, 0, 1)
    assert difference(actual, expected) <= 1e-10
    weight = torch.randn_like(expected)
    inputs = (left, right, *module.parameters())
    for one, other in zip(
        torch.autograd.grad((actual * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        assert difference(one, other) <= 1e-10


@directions
def test_the_bias_matters(direction, make_factors, difference):
    module, factors = make(direction), make_factors()
    before = module(factors).dense()
    with torch.no_grad():
        module.bias.zero_()
    assert difference(module(factors).dense(), before) > 0.05


def test_starting_and_ending_are_different_functions(make_factors, difference):
    factors = make_factors()
    assert difference(make("starting")(factors).dense(), make("ending")(factors).dense()) > 0.1


class Shapes(TorchDispatchMode):
    """Shapes of the results of all operations, those of the backward pass among them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, torch.Tensor):
                self.seen.add(tuple(part.shape))
        return result


@directions
@pytest.mark.parametrize("padded", [False, True])
def test_no_matrix_of_all_cells_is_saved_or_made(direction, padded, make_factors):
    n, saved = 37, []
    mask = (torch.arange(n) < 30).expand(2, n) if padded else None
    factors = PairFactors(*(x.float().requires_grad_() for x in make_factors(n=n)[:2]), mask)
    module = make(direction).float()
    with Shapes() as shapes:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
            loss = module(factors).left.square().sum() + module(factors).right.square().sum()
        loss.backward()
    assert saved
    assert len(shapes.seen) > 20
    assert max(shape.count(n) for shape in [*saved, *shapes.seen]) == 1
    with Shapes() as reference:
        algorithm(module, factors.dense()[0])
    assert max(shape.count(n) for shape in reference.seen) > 1  # the watch sees what it looks for


def test_rows_are_made_again_and_not_saved(make_factors):
    """What is saved once doubles with the cells; rows of p would fourfold."""
    totals = []
    for n in (32, 64):
        saved: dict[int, torch.Tensor] = {}  # by place in memory: all blocks share the right factors
        factors = PairFactors(*(x.requires_grad_() for x in make_factors(b=1, n=n)[:2]))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.setdefault(t.data_ptr(), t), lambda t: t
        ):
            make("starting")(factors)
        totals.append(sum(t.numel() for t in saved.values()))
    assert totals[1] < 2.2 * totals[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_heads": 3}, "n_channels=8"),
        ({"direction": "outgoing"}, "direction='outgoing'"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        TriangleAttention(**({"n_channels": 8, "n_heads": 2, "direction": "starting"} | arguments))


def test_nearly_dependent_factors_have_the_update_of_32_bits():
    torch.manual_seed(0)
    b, c, n, r = 1, 8, 40, 6
    left, right = torch.randn(b, c, n, r), torch.randn(b, c, n, 1) + 0.01 * torch.randn(b, c, n, r)
    module = TriangleAttention(c, n_heads=2, direction="starting")
    factors = PairFactors(left, right)
    expected = module(factors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = module(factors)
    whole, low = (f.left.float() @ f.right.float().mT for f in (expected, actual))
    assert (low - whole).norm() < 0.1 * whole.norm()
    assert actual.left.abs().max() < 2 * expected.left.abs().max()
