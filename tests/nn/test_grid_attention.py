"""Attention along a grid of cells: the grid, and attention against that of single lines."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from alphastomics.nn import SoftmaxAttention
from alphastomics.nn.attention.grid import GridAttention, quantile_grid
from alphastomics.nn.geometry import Geometry

D_MODEL, H = 16, 4


def attention(n_dims: int = 2, angle: float = 0.3, **kwargs) -> GridAttention:
    torch.manual_seed(0)
    module = GridAttention(D_MODEL, H, n_dims=n_dims, angle=angle, **kwargs).double()
    with torch.no_grad():
        for part in (module.along_rows, module.along_columns):
            part.q.weight *= 2
            part.kv.weight *= 2
    return module


def cells(b: int = 2, n: int = 23, n_dims: int = 2) -> tuple[torch.Tensor, Geometry, torch.Tensor]:
    torch.manual_seed(3)
    x, position = torch.randn(b, n, D_MODEL, dtype=torch.float64), torch.randn(b, n, n_dims, dtype=torch.float64)
    mask = torch.ones(b, n, dtype=torch.bool)
    mask[-1, ::2] = False  # so that lines of its square are empty
    return x, Geometry(position), mask


def lines_of(position: np.ndarray, axes: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
    """Rows and columns of the cells at ``position`` (n, D), as lists of cells."""
    n = len(position)
    m = math.ceil(math.sqrt(n))
    a, b = position @ axes.T[:, 0], position @ axes.T[:, 1]
    columns: list[list[int]] = [[] for _ in range(m)]
    for rank, cell in enumerate(np.argsort(a)):
        columns[rank * m // n].append(int(cell))
    for column in columns:
        column.sort(key=lambda cell: b[cell])
    rows = [[column[r] for column in columns if r < len(column)] for r in range(max(map(len, columns)))]
    return rows, columns


def along(part: SoftmaxAttention, x: torch.Tensor, lines: list[list[int]]) -> torch.Tensor:
    y = torch.zeros_like(x)
    for line in lines:
        y[line] = part(x[None, line])[0]
    return y


# -- the grid ----------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 60), padding=st.integers(0, 20), copies=st.booleans(), seed=st.integers(0, 99))
def test_grid_covers_each_cell_once(n, padding, copies, seed):
    """Bar 15; balanced, whatever lies beside it in the batch."""
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 3, n + padding, generator=generator)
    if copies:
        a, b = a.round(), b.round()
    mask = torch.zeros(3, n + padding, dtype=torch.bool)
    mask[0, torch.randperm(n + padding, generator=generator)[:n]] = True
    mask[1] = True
    grid = quantile_grid(a, b, mask)
    for i in range(3):
        count, side = int(mask[i].sum()), grid.occupied.shape[1]
        slots = grid.slot[i][mask[i]].tolist()
        assert len(set(slots)) == count
        assert all(slot < side**2 for slot in slots)
        assert bool((grid.slot[i][~mask[i]] == side**2).all())
        assert sorted(slots) == grid.occupied[i].flatten().nonzero()[:, 0].tolist()
        if count:
            m = math.ceil(math.sqrt(count))
            sizes = Counter(slot // side for slot in slots)
            assert sorted(sizes) == list(range(m))
            assert max(sizes.values()) - min(sizes.values()) <= 1
            assert sorted(Counter(slot % side for slot in slots).values())[1:] == [m] * (max(sizes.values()) - 1)


def test_cells_of_a_column_lie_between_the_same_quantiles():
    position = torch.randn(1, 400, 2, generator=torch.Generator().manual_seed(0))
    grid = quantile_grid(*position.unbind(-1), torch.ones(1, 400, dtype=torch.bool))
    laid = grid.lay(position)[0]  # (column, row, 2)
    assert bool((laid[1:, :, 0].amin(1) >= laid[:-1, :, 0].amax(1)).all())
    assert bool((laid[..., 1].diff(dim=1) >= 0).all())
    torch.testing.assert_close(grid.take(grid.lay(position)), position, atol=0, rtol=0)


def test_order_of_the_cells_of_a_lattice_carries_no_meaning():
    """Quantiles cut through its lines: ties in one coordinate are settled by the other."""
    lattice = [part.flatten()[None] for part in torch.meshgrid(torch.arange(5.0), torch.arange(8.0), indexing="ij")]
    order, mask = torch.randperm(40), torch.ones(1, 40, dtype=torch.bool)
    for a, b in (lattice, lattice[::-1]):
        expected = quantile_grid(a, b, mask).slot[:, order]
        assert torch.equal(quantile_grid(a[:, order], b[:, order], mask).slot, expected)


@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("angle", [0.0, 0.7, 2 * math.pi / 3])
def test_axes_are_orthonormal_and_turn(n_dims, angle):
    axes = attention(n_dims, angle).axes
    torch.testing.assert_close(axes @ axes.T, torch.eye(2, dtype=torch.float64), atol=1e-6, rtol=0)
    expected = {0.0: [1, 0, 0], 0.7: None, 2 * math.pi / 3: [0, 1, 0]}[angle]
    if n_dims == 2:
        expected = [math.cos(angle), math.sin(angle)]
    if expected is not None:
        torch.testing.assert_close(axes[0], torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("gate_type", ["headwise", "none"])
def test_attention_matches_single_lines(n_dims, gate_type):
    module, (x, geometry, mask) = attention(n_dims, gate_type=gate_type), cells(n_dims=n_dims)
    y = module(x, geometry, mask)
    for b in range(2):
        rows, columns = lines_of(geometry.position[b, mask[b]].numpy(), module.axes.numpy())
        real = x[b, mask[b]]
        along_rows = along(module.along_rows, real, rows)
        expected = along_rows + along(module.along_columns, real + along_rows, columns)
        torch.testing.assert_close(y[b, mask[b]], expected, atol=1e-10, rtol=1e-10)
        assert not bool(y[b, ~mask[b]].any())


def test_every_cell_reaches_every_other():
    module, (x, geometry, _) = attention(), cells(b=1, n=25)
    x.requires_grad_()
    for i in range(25):
        (gradient,) = torch.autograd.grad(module(x, geometry)[0, i].sum(), x)
        assert bool((gradient[0].abs().sum(1) > 0).all())


@settings(max_examples=20)
@given(more=st.integers(1, 30), value=st.sampled_from([0.0, 1e6, -7.0]))
def test_padding_changes_nothing(more, value):
    module, (x, geometry, _) = attention(), cells()
    expected = module(x, geometry)

    def longer(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.cat([tensor.new_full((2, more, tensor.shape[2]), value), tensor], 1)

    mask = (torch.arange(23 + more) >= more).expand(2, -1)
    y = module(longer(x, value), Geometry(longer(geometry.position, float("nan"))), mask)
    torch.testing.assert_close(y[:, more:], expected)
    assert not bool(y[:, :more].any())


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), absent=st.booleans())
def test_order_of_the_cells_carries_no_meaning(seed, absent):
    module, (x, geometry, mask) = attention(), cells()
    geometry = Geometry() if absent else geometry
    order = torch.randperm(23, generator=torch.Generator().manual_seed(seed))
    turned = Geometry() if absent else Geometry(geometry.position[:, order])
    torch.testing.assert_close(module(x[:, order], turned, mask[:, order]), module(x, geometry, mask)[:, order])


def test_turning_the_slice_is_turning_the_grid():
    (x, geometry, mask), angle = cells(), torch.tensor(0.5, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    expected = attention(angle=0.3)(x, geometry, mask)
    turned = attention(angle=0.8)(x, Geometry(geometry.position @ turn.T + 3), mask)
    torch.testing.assert_close(turned, expected)
    assert not torch.allclose(attention(angle=0.8)(x, geometry, mask), expected, atol=1e-3)


def test_absent_positions_have_no_effect():
    module, (x, geometry, mask) = attention(), cells()
    expected = module(x, Geometry(), mask)
    trust = torch.tensor([0.0, 1.0], dtype=torch.float64)
    y = module(x, Geometry(geometry.position * torch.tensor([float("nan"), 1.0])[:, None, None], trust), mask)
    torch.testing.assert_close(y[0], expected[0], atol=0, rtol=0)
    torch.testing.assert_close(y[1], module(x, geometry, mask)[1])
    assert not torch.allclose(y[1], expected[1], atol=1e-3)


# -- diagnostics -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [True, False])
def test_weights_are_the_product_of_both_matrices(masked):
    module, (x, geometry, mask) = attention(), cells()
    given_mask, keep = (mask, mask) if masked else (None, torch.ones_like(mask))
    weights = module.weights(x, torch.arange(23), geometry, given_mask)
    for b in range(2):
        real = x[b, keep[b]]
        rows, columns = lines_of(geometry.position[b, keep[b]].numpy(), module.axes.numpy())
        matrices = []
        for part, lines, values in (
            (module.along_rows, rows, real),
            (module.along_columns, columns, real + along(module.along_rows, real, rows)),
        ):
            matrix = torch.zeros(H, len(real), len(real), dtype=torch.float64)
            for line in lines:
                found = part.weights(values[None, line], torch.arange(len(line)))[0]
                matrix[:, torch.tensor(line)[:, None], torch.tensor(line)] = found
            matrices.append(matrix)
        torch.testing.assert_close(weights[b][:, keep[b]][:, :, keep[b]], matrices[1] @ matrices[0])
        assert not bool(weights[b][:, :, ~keep[b]].any())
    torch.testing.assert_close(module.weights(x, torch.tensor([4, 1]), geometry, given_mask), weights[:, :, [4, 1]])
    expected = torch.stack([weights[b][:, keep[b]].mean(1) for b in range(2)])
    torch.testing.assert_close(module.received(x, geometry, given_mask), expected)


def test_gates_are_those_along_rows():
    module, (x, _, _) = attention(), cells()
    assert module.gates(x).shape == (2, 23, H)
    assert attention(gate_type="none").gates(x) is None


# -- edge cases --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["one cell", "padding alone", "one point"])
def test_gradients_are_finite(case):
    module, (x, geometry, mask) = attention(), cells(n=23)
    if case == "one cell":
        x, geometry, mask = x[:, :1], Geometry(geometry.position[:, :1]), mask[:, :1]
    elif case == "padding alone":
        mask[0] = False
        geometry.position[0] = float("nan")
    else:
        geometry = Geometry(torch.ones_like(geometry.position))
    x = x.detach().requires_grad_()
    y = module(x, geometry, mask)
    y.square().sum().backward()
    for value in (y, x.grad, *(p.grad for p in module.parameters())):
        assert bool(value.isfinite().all())


def test_attention_in_16_bits():
    x, geometry, mask = cells(n=200)
    expected = attention()(x, geometry, mask)
    module = attention().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x.float(), Geometry(geometry.position.float()), mask)
    assert bool((y - expected).norm() / expected.norm() < 2e-2)


def test_work_is_a_fifth_of_that_of_full_attention():
    """Bar 15 in operations; in seconds it is measured by benchmarks/long_context.py."""

    def work(make) -> int:
        count = FlopCounterMode(display=False)
        with (
            FakeTensorMode(),
            sdpa_kernel(SDPBackend.MATH),
            torch.no_grad(),
            count,
        ):  # only this kernel is counted on all devices
            make()(torch.randn(1, 16_384, 128), Geometry(torch.randn(1, 16_384, 2)))
        return count.get_total_flops()

    assert 0 < work(lambda: GridAttention(128, 4, n_dims=2)) < work(lambda: SoftmaxAttention(128, 4)) / 5
