"""Attention over neighbors against dense masked attention in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from alphastomics.nn.attention import neighbor
from alphastomics.nn.attention.neighbor import NeighborAttention
from alphastomics.nn.geometry import Geometry
from alphastomics.nn.neighbors import neighbor_pairs
from alphastomics.nn.pair import PairFactors

D_MODEL, H = 16, 4
FORMS = {
    "distance": {},
    "order": {"sequence": True, "gate_type": "elementwise"},
    "plain": {"gate_type": "none", "use_qk_norm": False},
    "pairs": {"n_pair_channels": 3},
}
forms = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(params=[True, False], ids=["small blocks", "one block"])
def blocks(request, monkeypatch):
    """A few cells at a time, or all."""
    if request.param:
        monkeypatch.setitem(neighbor.BLOCK, "cpu", 500)


def attention(form: str, *, dtype: torch.dtype = torch.float64) -> NeighborAttention:
    torch.manual_seed(0)
    module = NeighborAttention(D_MODEL, H, **FORMS[form])
    with torch.no_grad():
        module.q.weight *= 2
        module.kv.weight *= 2
        module.edge.weight *= 5
    return module.to(dtype)


def cells(b: int = 2, n: int = 9, n_dims: int = 2, k: int = 5) -> tuple[torch.Tensor, Geometry, torch.Tensor]:
    """Cells, and a mask; cell 3 of the first context has no neighbors, and cell 4 lists itself, and one cell twice."""
    torch.manual_seed(3)
    x, position = torch.randn(b, n, D_MODEL, dtype=torch.float64), torch.randn(b, n, n_dims, dtype=torch.float64)
    mask = torch.ones(b, n, dtype=torch.bool)
    mask[-1, [2, n - 2]] = False
    neighbors = neighbor_pairs(position, mask, k=k)
    neighbors[0, 3] = -1
    neighbors[0, 4, 0] = 4
    neighbors[-1, 0, 0] = 2  # which is padding
    sequence = 3 * torch.randn(b, n, dtype=torch.float64)
    trust = torch.linspace(1, 0.3, b, dtype=torch.float64)
    pairs = PairFactors.masked(*torch.randn(2, b, 3, n, 4, dtype=torch.float64), mask)
    return x, Geometry(position, trust, sequence, neighbors=neighbors, pairs=pairs), mask


def affine(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias


def rms(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    for scale in norm.parameters():
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * scale
    return x


def bumps(u: torch.Tensor, low: float, high: float, n: int) -> torch.Tensor:
    centers = torch.linspace(low, high, n, dtype=torch.float64)
    return torch.exp(-((u[..., None] - centers) ** 2) / 2 / ((high - low) / (n - 1)) ** 2)


def dense(module: NeighborAttention, x: torch.Tensor, geometry: Geometry, mask: torch.Tensor, b: int):
    """Output (N, d) and attention matrices (H, N, N) of context b, from features of all pairs."""
    x, position, order, mask = x[b], geometry.position[b], geometry.sequence[b], mask[b]
    n = len(x)
    edge = torch.eye(n, dtype=torch.bool)
    for i, row in enumerate(geometry.neighbors[b].tolist()):
        for j in row:
            edge[i, j] |= j >= 0 and bool(mask[j])
    squared = (position[:, None] - position[None]).square().sum(-1)
    e = geometry.trust[b] * bumps((squared + 0.004**2).sqrt().log(), math.log(0.004), math.log(4), 16)
    if module.edge.in_features > 16:
        last = math.asinh(100)
        e = torch.cat([e, bumps((order[None] - order[:, None]).asinh(), -last, last, 17)], -1)
    d_h = D_MODEL // H
    heads, matrices, seen, pair_seen = [], [], [], []
    columns = module.pair_columns
    for h in range(H):
        parts = affine(module.q, x), *affine(module.kv, x).split(D_MODEL, dim=1)
        q, k, v = (part[:, h * d_h : (h + 1) * d_h] for part in parts)
        score = rms(q, module.q_norm) @ rms(k, module.k_norm).T / d_h**0.5 + e @ module.edge.weight[h]
        if columns is not None:
            left, right = geometry.pairs.left[b], geometry.pairs.right[b]
            mixed_left = torch.einsum("c,cnr->nr", columns.left[h], left)
            mixed_right = torch.einsum("c,cnr->nr", columns.right[h], right)
            score = score + mixed_left @ mixed_right.T
        matrix = score.masked_fill(~edge, float("-inf")).softmax(1)
        matrices.append(matrix)
        heads.append(matrix @ v)
        seen.append(torch.einsum("ij,ije->ie", matrix, e))
        if columns is not None:
            pair_seen.append(torch.einsum("ij,cir,jr->ic", matrix, left, mixed_right))
    o = torch.cat(heads, 1)
    if module.gate is not None:
        gate = affine(module.gate, x).sigmoid()
        o = o * (gate.repeat_interleave(d_h, 1) if gate.shape[1] == H else gate)
    y = affine(module.out, o) + affine(module.seen, torch.cat(seen + pair_seen, 1))
    return y * mask[:, None], torch.stack(matrices)


@forms
@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("n_dims", [2, 3])
def test_attention_matches_the_formula(form, n_dims):
    """Bar 11, and the gradients, which are computed block by block on the way back."""
    module, (x, geometry, mask) = attention(form), cells(n_dims=n_dims)
    inputs = [x, geometry.position, *([geometry.sequence] if form == "order" else []), *module.parameters()]
    for tensor in inputs:
        tensor.requires_grad_()
    y = module(x, geometry, mask)
    outs, matrices = zip(*(dense(module, x, geometry, mask, b) for b in range(2)), strict=True)
    expected = torch.stack(outs)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-12)
    weights = module.weights(x, torch.arange(9), geometry, mask)
    torch.testing.assert_close(weights, torch.stack(matrices), atol=1e-12, rtol=1e-12)
    cotangent = torch.randn_like(y)
    for mine, theirs in zip(
        torch.autograd.grad(y, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


@pytest.mark.usefixtures("blocks")
def test_gradients_match_differences():
    module, (x, geometry, mask) = attention("order"), cells(b=1, n=5, k=3)

    def outcome(x: torch.Tensor, position: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        located = geometry._replace(position=position)
        return torch.func.functional_call(module, {"edge.weight": w}, (x, located, mask))

    w = module.edge.weight.detach().clone()
    inputs = tuple(tensor.requires_grad_() for tensor in (x, geometry.position, w))
    assert torch.autograd.gradcheck(outcome, inputs, fast_mode=True)


def test_single_precision_is_enough():
    x, geometry, mask = cells(n=200, k=12)
    expected = attention("order")(x, geometry, mask)
    single = Geometry(*(t.float() for t in geometry[:3]), neighbors=geometry.neighbors)
    actual = attention("order", dtype=torch.float32)(x.float(), single, mask)
    assert float(((actual - expected).norm() / expected.norm()).detach()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distances_match_32_bits_under_autocast(dtype):
    x, geometry, mask = cells(n=200, k=12)
    expected = attention("order")(x, geometry, mask)
    single = Geometry(*(t.float() for t in geometry[:3]), neighbors=geometry.neighbors)
    module = attention("order", dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        actual = module(x.float().requires_grad_(), single, mask)
    assert float(((actual - expected).norm() / expected.norm()).detach()) < 1e-2
    actual.float().square().sum().backward()
    assert module.edge.weight.grad.dtype == torch.float32
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters())


# -- invariance --------------------------------------------------------------------------------------------------------


@forms
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31), mirror=st.sampled_from([1.0, -1.0]))
def test_motions_and_reflections_change_nothing(form, seed, mirror):
    module, (x, geometry, mask) = attention(form), cells()
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand((), generator=generator, dtype=torch.float64) * 6.3
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), mirror * torch.stack([angle.sin(), angle.cos()])])
    shift = 10 * torch.randn(2, generator=generator, dtype=torch.float64)
    moved = geometry._replace(position=geometry.position @ turn.T + shift, sequence=geometry.sequence + shift[0])
    torch.testing.assert_close(module(x, moved, mask), module(x, geometry, mask), atol=1e-10, rtol=0)


@forms
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_order_of_the_rows_carries_no_meaning(form, seed):
    module, (x, geometry, mask) = attention(form), cells()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    name = torch.cat([order.argsort(), torch.tensor([-1])])  # of the cells, and -1 for no cell
    turned = Geometry(
        geometry.position[:, order],
        geometry.trust,
        geometry.sequence[:, order],
        neighbors=name[geometry.neighbors][:, order],
        pairs=PairFactors(*(factor[:, :, order] for factor in geometry.pairs[:2])),
    )
    torch.testing.assert_close(module(x[:, order], turned, mask[:, order]), module(x, geometry, mask)[:, order])


@forms
@settings(max_examples=8)
@given(more=st.integers(1, 5), value=st.sampled_from([0.0, 1e6, -7.0]))
def test_padding_changes_nothing(form, more, value):
    module, (x, geometry, _) = attention(form), cells()
    expected = module(x, geometry)

    def longer(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((2, more, *tensor.shape[2:]), value)], 1)

    long = Geometry(
        longer(geometry.position, float("nan")),
        geometry.trust,
        longer(geometry.sequence, value),
        neighbors=longer(geometry.neighbors, -1),
        pairs=PairFactors(*(torch.nn.functional.pad(factor, (0, 0, 0, more)) for factor in geometry.pairs[:2])),
    )
    y = module(longer(x, value), long, (torch.arange(9 + more) < 9).expand(2, -1))
    torch.testing.assert_close(y[:, :9], expected)
    assert not bool(y[:, 9:].any())


def test_absent_positions_have_no_effect():
    module, (x, geometry, mask) = attention("order"), cells()
    nowhere = geometry._replace(position=geometry.position * float("nan"), trust=torch.zeros(2, dtype=torch.float64))
    expected = module(x, geometry._replace(position=None), mask)
    torch.testing.assert_close(module(x, nowhere, mask), expected, atol=0, rtol=0)
    assert not torch.allclose(module(x, geometry, mask), expected, atol=1e-3)


def test_only_neighbors_are_attended_to():
    module, (x, geometry, mask) = attention("distance"), cells(b=1)
    x.requires_grad_()
    for i in range(9):
        (gradient,) = torch.autograd.grad(module(x, geometry, mask)[0, i].sum(), x)
        named = {j for j in geometry.neighbors[0, i].tolist() if j >= 0 and mask[0, j]} | {i}
        seen = set(gradient[0].abs().sum(1).nonzero()[:, 0].tolist())
        assert seen == (named if mask[0, i] else set())


# -- diagnostics -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("masked", [True, False])
def test_received_attention_is_the_mean_over_real_cells(masked):
    module, (x, geometry, mask) = attention("order"), cells()
    given_mask = mask if masked else None
    weights = module.weights(x, torch.arange(9), geometry, given_mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, 9, dtype=torch.float64))
    rows = torch.tensor([4, 1])
    torch.testing.assert_close(module.weights(x, rows, geometry, given_mask), weights[:, :, rows])
    keep = mask if masked else torch.ones_like(mask)
    expected = torch.stack([weights[i][:, keep[i]].mean(1) for i in range(2)])
    torch.testing.assert_close(module.received(x, geometry, given_mask), expected)


# -- edge cases --------------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("case", ["one cell", "padding alone", "one point", "no neighbors", "no columns"])
def test_gradients_are_finite(form, case):
    module, (x, geometry, mask) = attention(form), cells(n=9)
    if case == "one cell":
        x, mask, nobody = x[:, :1], mask[:, :1], torch.full((2, 1, 3), -1)
        pairs = PairFactors(*(factor[:, :, :1] for factor in geometry.pairs[:2]))
        geometry = Geometry(geometry.position[:, :1], None, geometry.sequence[:, :1], neighbors=nobody, pairs=pairs)
    elif case == "padding alone":
        mask[0] = False
        geometry.position[0] = geometry.sequence[0] = float("nan")
    elif case == "one point":
        geometry = geometry._replace(position=torch.ones_like(geometry.position))
    elif case == "no neighbors":
        geometry = geometry._replace(neighbors=torch.full_like(geometry.neighbors, -1))
    else:
        geometry = geometry._replace(neighbors=geometry.neighbors[..., :0])
    leaves = [tensor.detach().requires_grad_() for tensor in (x, geometry.position)]
    y = module(leaves[0], geometry._replace(position=leaves[1]), mask)
    y.square().sum().backward()
    for value in (y, *(leaf.grad for leaf in leaves), *(p.grad for p in module.parameters())):
        assert bool(value.isfinite().all())


@forms
def test_every_parameter_learns(form):
    module, (x, geometry, mask) = attention(form), cells()
    for absent in (True, False):
        module.zero_grad()
        module(x, geometry._replace(position=None) if absent else geometry, mask).square().sum().backward()
        assert all(p.grad is not None for p in module.parameters())
    assert all(bool(p.grad.any()) for p in module.parameters())


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"neighbors": None}, "neighbors"),
        ({"sequence": None}, "sequence=True"),
        ({"pairs": None}, "n_pair_channels"),
    ],
)
def test_missing_geometry_raises(missing, message):
    x, geometry, mask = cells()
    with pytest.raises(ValueError, match=message):
        attention("pairs" if "pairs" in missing else "order")(x, geometry._replace(**missing), mask)


# -- memory ------------------------------------------------------------------------------------------------------------

STEP = """
import sys
import time
from pathlib import Path
import torch
from alphastomics.nn.attention.neighbor import NeighborAttention
from alphastomics.nn.geometry import Geometry
from alphastomics.nn.neighbors import neighbor_pairs

n = int(sys.argv[1])
module = NeighborAttention(128, 4)
position = torch.randn(1, n, 2)
neighbors = neighbor_pairs(position, k=32)
module(torch.randn(1, n, 128), Geometry(position, neighbors=neighbors)).square().sum().backward()
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
sys.stdout.write(peak.split()[1])
"""


def peak(n: int) -> int:
    """Peak memory in kB of a process that makes one forward and one backward pass over n cells."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STEP, str(n)]
    return int(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=300).stdout)


@pytest.mark.slow
def test_memory_grows_with_the_cells_alone():
    """Bar 11: 4 times the cells need 4.3 times the memory at most; the edges of 16,384 alone would be 550 MB."""
    idle = peak(64)
    small, large = peak(4096) - idle, peak(16384) - idle
    assert large <= 4.3 * small
    assert large < 300_000


def test_shapes_alone_are_computed_quickly():
    """As an estimate of memory does, for which one block stands for all 200 of them."""
    n = 100_000
    start = time.process_time()
    with FakeTensorMode():
        module, x = NeighborAttention(128, 4), torch.randn(1, n, 128)
        geometry = Geometry(torch.randn(1, n, 2), neighbors=torch.zeros(1, n, 32, dtype=torch.int64))
        y = module(x, geometry)
        y.sum().backward()
    assert y.shape == (1, n, 128)
    assert module.kv.weight.grad.shape == (256, 128)
    assert time.process_time() - start < 5
