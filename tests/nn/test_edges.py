"""Products and sums along edges against dense sums in float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from alphastomics.nn.attention.edges import edge_products, edge_sums, returned_sums


def graph(seed: int, n_cells: int, n_edges: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q and k (3, M, 5), weights (3, M, E) and random ends (M, E), of which some are there twice."""
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 3, n_cells, 5, generator=generator, dtype=torch.float64)
    a = torch.randn(3, n_cells, n_edges, generator=generator, dtype=torch.float64)
    return q, k, a, torch.randint(n_cells, (n_cells, n_edges), generator=generator, dtype=torch.int32)


graphs = given(seed=st.integers(0, 2**31), n_cells=st.integers(1, 12), n_edges=st.integers(1, 20))


@settings(max_examples=40)
@graphs
def test_products_and_sums_match_the_formula(seed, n_cells, n_edges):
    q, k, a, other = graph(seed, n_cells, n_edges)
    s, o, g = edge_products(q, k, other), edge_sums(a, k, other), returned_sums(a, list(q), other, n_cells)
    expected_g = torch.zeros_like(g)
    for h in range(3):
        for i in range(n_cells):
            expected_o = torch.zeros(5, dtype=torch.float64)
            for e, j in enumerate(other[i].tolist()):
                torch.testing.assert_close(s[h, i, e], (q[h, i] * k[h, j]).sum())
                expected_o += a[h, i, e] * k[h, j]
                expected_g[h, j] += a[h, i, e] * q[h, i]
            torch.testing.assert_close(o[h, i], expected_o)
    torch.testing.assert_close(g, expected_g)


@settings(max_examples=20)
@graphs
def test_each_is_a_gradient_of_another(seed, n_cells, n_edges):
    q, k, a, other = graph(seed, n_cells, n_edges)
    sums = (a.requires_grad_()[..., None] * k.requires_grad_()[:, other.long()]).sum(2)
    of_a, of_k = torch.autograd.grad(sums, (a, k), q)
    torch.testing.assert_close(edge_products(q, k.detach(), other), of_a)
    torch.testing.assert_close(returned_sums(a.detach(), list(q), other, n_cells), of_k)


def test_some_cells_have_the_rows_of_all():
    q, k, a, other = graph(0, 50, 4)
    rows = slice(10, 17)
    torch.testing.assert_close(edge_products(q[:, rows], k, other[rows]), edge_products(q, k, other)[:, rows])
    torch.testing.assert_close(edge_sums(a[:, rows], k, other[rows]), edge_sums(a, k, other)[:, rows])
    parts = [returned_sums(a[:, part], list(q[:, part]), other[part], 50) for part in (slice(0, 30), slice(30, 50))]
    torch.testing.assert_close(parts[0] + parts[1], returned_sums(a, list(q), other, 50))


def test_shapes_are_known_without_data():
    with FakeTensorMode():
        q, a, other = torch.randn(2, 9, 5), torch.randn(2, 9, 4), torch.zeros(9, 4, dtype=torch.int32)
        assert edge_products(q, q, other).shape == (2, 9, 4)
        assert edge_sums(a, q, other).shape == returned_sums(a, list(q), other, 9).shape == (2, 9, 5)


@pytest.mark.slow
def test_no_warning_about_sparse_tensors():
    """In a process of its own, because PyTorch warns once."""
    code = (
        "import torch; from alphastomics.nn.attention.edges import edge_products; x = torch.ones(1, 2, 3); "
        "edge_products(x, x, torch.zeros(2, 2, dtype=torch.int32))"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True, timeout=100)
