"""Geometric attention against dense attention with all its N x N matrices, in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.profiler import ProfilerActivity, profile

from alphastomics.nn.attention.geometric import GeometricAttention, _distance_columns
from alphastomics.nn.geometry import Geometry

D_MODEL, H, C, R = 16, 4, 3, 2
FORMS = {
    "distance": {},
    "pairs": {"n_pair_channels": C},
    "channel gates": {"n_pair_channels": C, "gate_type": "elementwise"},
    "plain": {"gate_type": "none", "use_qk_norm": False},
}
forms = pytest.mark.parametrize("form", FORMS)
dims = pytest.mark.parametrize("n_dims", [2, 3])


class Factors(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def attention(form: str, n_dims: int = 2, *, dtype: torch.dtype = torch.float64) -> GeometricAttention:
    torch.manual_seed(0)
    module = GeometricAttention(D_MODEL, H, n_dims=n_dims, **FORMS[form])
    with torch.no_grad():
        module.q.weight *= 2  # attention that is far from uniform
        module.kv.weight *= 2
    return module.to(dtype)


def rotation(n_dims: int, *batch: int) -> torch.Tensor:
    q, r = torch.linalg.qr(torch.randn(*batch, n_dims, n_dims, dtype=torch.float64))
    q = q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[..., None, :]
    return q * torch.cat([torch.ones_like(q[..., :1, 1:]), torch.linalg.det(q)[..., None, None]], dim=-1)


def cells(b: int = 2, n: int = 7, n_dims: int = 2) -> tuple[torch.Tensor, Geometry]:
    torch.manual_seed(3)
    x = torch.randn(b, n, D_MODEL, dtype=torch.float64)
    pairs = Factors(*torch.randn(2, b, C, n, R, dtype=torch.float64))
    trust = torch.linspace(1, 0.3, b, dtype=torch.float64)
    position = torch.randn(b, n, n_dims, dtype=torch.float64) + 5
    return x, Geometry(position, trust, pairs=pairs)


def some(b: int = 2, n: int = 7) -> torch.Tensor:
    mask = torch.ones(b, n, dtype=torch.bool)
    mask[-1, [2, n - 2]] = False
    return mask


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


def affine(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias


def rms(x: torch.Tensor, norm: torch.nn.Module) -> torch.Tensor:
    for scale in norm.parameters():
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * scale
    return x


def dense(module: GeometricAttention, x: torch.Tensor, geometry: Geometry, mask: torch.Tensor, b: int):
    """Output (n, d) and attention matrices (H, n, n) of the real cells of context b, pair by pair."""
    keep = mask[b]
    x, position, trust = x[b, keep], geometry.position[b, keep], geometry.trust[b]
    left, right = (f[b][:, keep] for f in geometry.pairs)
    w_l = (1 / 3 if module.pair_columns else 1 / 2) ** 0.5
    d_h = D_MODEL // H
    heads, matrices, features = [], [], []
    for h in range(H):
        parts = affine(module.q, x), *affine(module.kv, x).split(D_MODEL, dim=1)
        q, k, v = (part[:, h * d_h : (h + 1) * d_h] for part in parts)
        score = w_l * rms(q, module.q_norm) @ rms(k, module.k_norm).T / d_h**0.5
        length = module.log_length[h].exp()
        squared = (position[:, None] - position[None]).square().sum(-1) / length**2
        score = score - trust / 2 * squared
        if module.pair_columns:
            u = torch.einsum("c,cnr->nr", module.pair_columns.left[h], left)
            u_ = torch.einsum("c,cnr->nr", module.pair_columns.right[h], right)
            score = score + w_l * u @ u_.T
        matrix = score.softmax(1)
        matrices.append(matrix)
        heads.append(matrix @ v)
        if module.pair_columns:
            features.append(torch.einsum("ij,ijc->ic", matrix, torch.einsum("cir,jr->ijc", left, u_)))
    o = torch.cat(heads, 1)
    if module.gate is not None:
        gate = affine(module.gate, x).sigmoid()
        o = o * (gate.repeat_interleave(d_h, 1) if gate.shape[1] == H else gate)
    y = affine(module.out, o)
    if module.seen is not None:
        y = y + affine(module.seen, torch.cat(features, 1))
    return y, torch.stack(matrices)


@forms
@dims
def test_attention_matches_the_formula(form, n_dims):
    """Bar 3: values to 1e-12 and gradients to 1e-10 of dense attention."""
    module, mask = attention(form, n_dims), some()
    x, geometry = cells(n_dims=n_dims)
    inputs = [x, geometry.position, *geometry.pairs, *module.parameters()]
    for tensor in inputs:
        tensor.requires_grad_()
    y, weights = module(x, geometry, mask), module.weights(x, torch.arange(7), geometry, mask)
    assert y.dtype == torch.float64
    expected = torch.zeros_like(y)
    for i in range(2):
        out, matrix = dense(module, x, geometry, mask, i)
        expected = expected.index_put((torch.tensor(i), mask[i].nonzero()[:, 0]), out)
        torch.testing.assert_close(weights[i][:, mask[i]][:, :, mask[i]], matrix, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-12)
    cotangent = torch.randn_like(y)
    actual = torch.autograd.grad(y, inputs, cotangent, allow_unused=True)
    wanted = torch.autograd.grad(expected, inputs, cotangent, allow_unused=True)
    for mine, theirs in zip(actual, wanted, strict=True):
        if theirs is None:
            assert mine is None or not bool(mine.any())
        else:
            torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


@forms
def test_single_precision_is_enough(form):
    """Bar 3: 1e-5 of the value in double precision."""
    x, geometry = cells(n=50)
    expected = attention(form)(x, geometry)
    pairs = Factors(*(factor.float() for factor in geometry.pairs))
    single = Geometry(*(None if t is None else t.float() for t in geometry[:3]), pairs=pairs)
    actual = attention(form, dtype=torch.float32)(x.float(), single)
    assert relative(actual, expected) < 1e-5


# -- invariance --------------------------------------------------------------------------------------------------------


@forms
@dims
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_motions_of_the_slice_change_nothing(form, n_dims, seed):
    """Bar 6: 1e-10."""
    module, (x, geometry) = attention(form, n_dims), cells(n_dims=n_dims)
    expected = module(x, geometry)
    torch.manual_seed(seed)
    turn, shift = rotation(n_dims), 10 * torch.randn(n_dims, dtype=torch.float64)
    moved = geometry._replace(position=geometry.position @ turn.T + shift)
    torch.testing.assert_close(module(x, moved), expected, atol=1e-10, rtol=0)


def test_reflections_change_nothing():
    module, (x, geometry) = attention("distance"), cells()
    mirrored = geometry._replace(position=geometry.position * torch.tensor([-1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(module(x, mirrored), module(x, geometry), atol=1e-10, rtol=0)


def test_shifts_cost_no_precision():
    """In single precision, for positions that remain exact."""
    x, geometry = cells(n=50)
    module, exact = attention("distance", dtype=torch.float32), (geometry.position.float() * 512).round() / 512
    expected = module(x.float(), Geometry(exact))
    assert relative(module(x.float(), Geometry(exact + 2**13)), expected) < 1e-5


@forms
@settings(max_examples=8)
@given(seed=st.integers(0, 2**31))
def test_order_of_the_cells_carries_no_meaning(form, seed):
    module, (x, geometry), mask = attention(form), cells(), some()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(seed))
    pairs = Factors(*(factor[:, :, order] for factor in geometry.pairs))
    turned = geometry._replace(position=geometry.position[:, order], pairs=pairs)
    torch.testing.assert_close(module(x[:, order], turned, mask[:, order]), module(x, geometry, mask)[:, order])


def padded(tensor: torch.Tensor, more: int, value: float, dim: int = 1) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = more
    return torch.cat([tensor, tensor.new_full(shape, value)], dim)


@forms
@settings(max_examples=8)
@given(more=st.integers(1, 5), value=st.sampled_from([0.0, 1e6, -7.0]))
def test_padding_changes_nothing(form, more, value):
    module, (x, geometry) = attention(form), cells()
    expected = module(x, geometry)
    pairs = Factors(*(padded(factor, more, value, dim=2) for factor in geometry.pairs))
    long = Geometry(
        padded(geometry.position, more, float("nan")),
        geometry.trust,
        pairs=pairs,
    )
    mask = (torch.arange(7 + more) < 7).expand(2, -1)
    y = module(padded(x, more, value), long, mask)
    torch.testing.assert_close(y[:, :7], expected)
    assert not bool(y[:, 7:].any())


# -- trust -------------------------------------------------------------------------------------------------------------


@forms
def test_absent_positions_have_no_effect(form):
    module, (x, geometry) = attention(form), cells()
    absent = geometry._replace(trust=torch.zeros(2, dtype=torch.float64))
    expected = module(x, absent)
    nowhere = absent._replace(position=torch.full_like(geometry.position, float("nan")))
    torch.testing.assert_close(module(x, nowhere), expected, atol=0, rtol=0)
    torch.testing.assert_close(module(x, geometry._replace(position=None)), expected, atol=0, rtol=0)
    assert not torch.allclose(module(x, geometry), expected, atol=1e-3)


def test_trust_scales_the_squared_distance():
    module, (x, geometry) = attention("distance"), cells()
    halved = module.weights(x, torch.arange(7), geometry._replace(trust=torch.full((2,), 0.25, dtype=torch.float64)))
    nearer = geometry._replace(position=geometry.position / 2, trust=None)
    torch.testing.assert_close(halved, module.weights(x, torch.arange(7), nearer))


def test_heads_look_at_different_distances():
    module = attention("distance")
    steps = module.log_length.diff()
    torch.testing.assert_close(steps, steps[:1].expand(3))
    assert module.log_length.exp()[[0, -1]].tolist() == pytest.approx([0.05, 2.0])
    x, geometry = (
        torch.ones(1, 400, D_MODEL, dtype=torch.float64),
        Geometry(torch.randn(1, 400, 2, dtype=torch.float64)),
    )
    distance = torch.cdist(geometry.position[0], geometry.position[0])
    reach = (module.weights(x, torch.arange(400), geometry)[0] * distance).sum(-1).mean(-1)
    assert bool((reach.diff() > 0).all())
    assert bool(reach[0] < 0.1)
    assert bool(reach[-1] > 1)


# -- diagnostics -------------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("masked", [True, False])
def test_received_attention_is_the_mean_over_real_cells(form, masked, monkeypatch):
    monkeypatch.setattr("alphastomics.nn.attention.geometric.BLOCK", 2 * H * 7 * 3)  # three rows at a time
    module, (x, geometry), mask = attention(form), cells(), some()
    given_mask = mask if masked else None
    weights = module.weights(x, torch.arange(7), geometry, given_mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, 7, dtype=torch.float64))
    rows = torch.tensor([4, 1])
    torch.testing.assert_close(module.weights(x, rows, geometry, given_mask), weights[:, :, rows])
    keep = mask if masked else torch.ones_like(mask)
    expected = torch.stack([weights[i][:, keep[i]].mean(1) for i in range(2)])
    torch.testing.assert_close(module.received(x, geometry, given_mask), expected)


def test_rank_of_the_pairs_may_change():
    module, (x, geometry) = attention("pairs"), cells()
    more = Factors(*(torch.cat([factor, torch.zeros_like(factor)], -1) for factor in geometry.pairs))
    torch.testing.assert_close(module(x, geometry._replace(pairs=more)), module(x, geometry))


# -- edge cases --------------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("case", ["one cell", "padding alone", "one point"])
def test_gradients_are_finite(form, case):
    module, (x, geometry) = attention(form), cells(n=1 if case == "one cell" else 7)
    mask = torch.ones(x.shape[:2], dtype=torch.bool)
    if case == "padding alone":
        mask[0] = False
        geometry.position[0] = float("nan")
    if case == "one point":
        geometry = geometry._replace(position=torch.ones_like(geometry.position))
    for tensor in (x, geometry.position):
        tensor.requires_grad_()
    y = module(x, geometry, mask)
    y.square().sum().backward()
    for value in (y, x.grad, geometry.position.grad, *(p.grad for p in module.parameters())):
        assert bool(value.isfinite().all())


@forms
def test_every_parameter_learns(form):
    module, (x, geometry) = attention(form), cells()
    for absent in (True, False):
        module.zero_grad()
        module(x, geometry._replace(position=None) if absent else geometry).square().sum().backward()
        assert all(p.grad is not None for p in module.parameters())
    assert all(bool(p.grad.any()) for p in module.parameters())


@pytest.mark.parametrize(
    ("form", "missing", "message"),
    [
        ("pairs", {"pairs": None}, "n_pair_channels"),
        ("distance", {"position": torch.zeros(2, 7, 3)}, "positions.*3 dimensions"),
    ],
)
def test_missing_geometry_raises(form, missing, message):
    module, (x, geometry) = attention(form), cells()
    with pytest.raises(ValueError, match=message):
        module(x, geometry._replace(**missing))


# -- 16 bits -----------------------------------------------------------------------------------------------------------


def tissue(n: int = 1500) -> tuple[torch.Tensor, Geometry]:
    torch.manual_seed(5)
    x, position = torch.randn(1, n, D_MODEL, dtype=torch.float64), torch.randn(1, n, 2, dtype=torch.float64)
    pairs = Factors(*torch.randn(2, 1, C, n, R, dtype=torch.float64))
    return x, Geometry(position, pairs=pairs)


def in_16_bits(form: str, dtype: torch.dtype) -> tuple[torch.Tensor, GeometricAttention]:
    x, geometry = tissue()
    module = attention(form, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        return module(x.float(), geometry._replace(position=geometry.position.float())), module


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_split_columns_keep_distances_in_16_bits(form, dtype):
    """Bar 3: 1e-2 of the value in double precision."""
    y, _ = in_16_bits(form, dtype)
    assert relative(y, attention(form)(*tissue())) < 1e-2


def test_weights_match_32_bits():
    x, geometry = tissue(300)
    single, rows = geometry._replace(position=geometry.position.float()), torch.arange(300)
    expected = attention("distance").weights(x, rows, geometry)
    module = attention("distance", dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights, received = module.weights(x.float(), rows, single), module.received(x.float(), single)
    assert relative(weights, expected) < 1e-2
    assert relative(received, expected.mean(2)) < 1e-2


def test_without_the_split_distances_are_lost(monkeypatch):
    def rounded(y, z, padding, dtype):
        return _distance_columns(y, z, padding, torch.float32)

    monkeypatch.setattr("alphastomics.nn.attention.geometric._distance_columns", rounded)
    y, _ = in_16_bits("distance", torch.bfloat16)
    assert relative(y, attention("distance")(*tissue())) > 0.1


def test_gradients_in_16_bits():
    y, module = in_16_bits("distance", torch.bfloat16)
    cotangent = torch.randn(y.shape)
    y.backward(cotangent)
    expected = attention("distance")
    expected(*tissue()).backward(cotangent.double())
    for layer, exact in ((module.q, expected.q), (module.kv, expected.kv)):
        assert relative(layer.weight.grad, exact.weight.grad) < 2e-2
    assert module.log_length.grad.tolist() == [0] * H


@given(magnitude=st.floats(1e-3, 300), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_split_columns_are_distances_between_points_that_moved_a_little(magnitude, dtype):
    y = magnitude * torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k = _distance_columns(y, y, None, dtype)
    assert torch.equal(q, q.to(dtype).double())
    moved = q[:, :2] + q[:, 4:6]
    assert float((moved - y).abs().max()) <= 2**-17 * float(y.abs().max()) + 1e-7
    scores = q @ k.T - 0.5 * moved.square().sum(1, keepdim=True)
    tolerance = 1e-4 + 2**-23 * float(moved.square().sum(1).max())  # of the squares in three parts
    torch.testing.assert_close(scores, -0.5 * torch.cdist(moved, moved).square(), atol=tolerance, rtol=1e-9)


# -- time and memory ---------------------------------------------------------------------------------------------------


def test_kernel_is_the_one_without_a_matrix():
    """Bar 4: for queries, keys and values of one width, masks and gradients included."""
    module, (x, geometry), mask = attention("channel gates"), cells(), some()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        module(x.requires_grad_(), geometry, mask).sum().backward()
    names = {event.key for event in record.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in names
    assert not any("attention_math" in name for name in names)


STEP = """
import sys
from pathlib import Path
from typing import NamedTuple
import torch
from alphastomics.nn.attention.geometric import GeometricAttention, _distance_columns
from alphastomics.nn.geometry import Geometry

class Factors(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor

def dense(module, x, geometry):
    n, d = x.shape[1:]
    q, k, v = module.heads(x)
    y = module._in_lengths(x, geometry, None)
    u, w = module.pair_columns.columns(geometry.pairs, x.dtype)
    squared = (y[:, :, :, None] - y[:, :, None]).square().sum(-1)
    a = (module.content * (q @ k.mT / module.d_head**0.5 + u @ w.mT) - squared / 2).softmax(-1)
    return torch.cat([a @ v, a @ w], -1)

kind, n = sys.argv[1], int(sys.argv[2])
module = GeometricAttention(128, 4, n_dims=3, n_pair_channels=8)
x = torch.randn(1, n, 128)
geometry = Geometry(torch.randn(1, n, 3), pairs=Factors(*torch.randn(2, 1, 8, n, 4)))
y = module(x, geometry, torch.ones(1, n, dtype=torch.bool)) if kind == "flash" else dense(module, x, geometry)
y.square().sum().backward()
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
sys.stdout.write(peak.split()[1])
"""


def peak(kind: str, n: int) -> int:
    """Peak memory in kB of a process that makes one forward and one backward pass over n cells."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", STEP, kind, str(n)]
    return int(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=300).stdout)


@pytest.mark.slow
def test_memory_grows_with_the_cells_alone():
    """Bars 4 and 5: 4 times the cells need 4.3 times the memory at most, and a tenth of what a dense matrix needs."""
    idle = peak("flash", 16)
    small, large, dense_small = (
        peak(kind, n) - idle for kind, n in (("flash", 2048), ("flash", 8192), ("dense", 2048))
    )
    assert large <= 4.3 * small
    assert large <= 0.1 * dense_small
