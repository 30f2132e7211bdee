"""Separable convolutions against loops over places and over neighbors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

import separable
from rotations import random_rotation
from separable import SeparableConv

every_kind = pytest.mark.parametrize("kind", ["sequence", "graph"])
SIZES = (9, 6)
C, C_OUT, K = 4, 3, 5


def conv(kind: str) -> SeparableConv:
    torch.manual_seed(1)
    return SeparableConv(C, C_OUT, kind=kind, kernel_size=5, n_basis=6, max_distance=2.0).double()


def inputs(seed: int = 0, n_dims: int = 2) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Cells in contexts of two sizes, the mask, and a sequence index and a graph with holes, both at random."""
    generator = torch.Generator().manual_seed(seed)
    b, n = len(SIZES), max(SIZES)
    x = torch.randn(b, n, C, generator=generator, dtype=torch.float64)
    mask = torch.arange(n) < torch.tensor(SIZES)[:, None]
    geometry = {
        "index": torch.rand(b, n, generator=generator),
        "position": torch.randn(b, n, n_dims, generator=generator, dtype=torch.float64),
        "neighbors": torch.randint(-1, n, (b, n, K), generator=generator),
    }
    return x, mask, geometry


def chosen(kind: str, geometry: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in geometry.items() if (name == "index") == (kind == "sequence")}


def by_loops(layer: SeparableConv, x: np.ndarray, geometry: dict[str, np.ndarray]) -> np.ndarray:
    """One context without padding."""
    z = np.zeros_like(x)
    if "index" in geometry:
        weight, order = layer.depthwise.conv.weight.detach().numpy()[:, 0], np.argsort(geometry["index"])
        for place, i in enumerate(order):
            for k in range(-2, 3):
                if 0 <= place + k < len(x):
                    z[i] += weight[:, k + 2] * x[order[place + k]]
    else:
        weight, position = layer.depthwise.phi.weight.detach().numpy(), geometry["position"]
        centers, spacing = np.arange(6) * 0.4, 0.4
        for i, near in enumerate(geometry["neighbors"]):
            for j in near[(near >= 0) & (near < len(x))]:
                d = np.linalg.norm(position[i] - position[j])
                z[i] += weight @ np.exp(-((d - centers) ** 2) / (2 * spacing**2)) * x[j]
    return z @ layer.pointwise.weight.detach().numpy().T


@every_kind
@pytest.mark.parametrize("n_dims", [2, 3])
def test_values_match_loops(kind, n_dims):
    layer, (x, mask, geometry) = conv(kind), inputs(n_dims=n_dims)
    geometry = chosen(kind, geometry)
    y = layer(x, mask, **geometry)
    assert y.shape == (len(SIZES), max(SIZES), C_OUT)
    for b, n in enumerate(SIZES):
        expected = by_loops(layer, x[b, :n].numpy(), {name: value[b, :n].numpy() for name, value in geometry.items()})
        np.testing.assert_allclose(y[b, :n].detach(), expected, atol=1e-6)  # centers are single precision
        assert not bool(y[b, n:].any())


def test_cells_in_order_need_no_index():
    layer, (x, mask, _) = conv("sequence"), inputs()
    index = torch.arange(max(SIZES)).expand(mask.shape)
    torch.testing.assert_close(layer(x, mask), layer(x, mask, index=index))


@every_kind
@given(seed=st.integers(0, 1000))
def test_neither_padding_nor_order_nor_motion_changes_anything(kind, seed):
    layer, (x, mask, geometry) = conv(kind), inputs(seed)
    expected = layer(x, mask, **chosen(kind, geometry))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(max(SIZES), generator=generator)
    place = torch.cat([order.argsort(), torch.tensor([-1])])  # where a cell went; -1 stays
    turn = random_rotation(2, generator).double()
    rubbish = {
        "index": geometry["index"].masked_fill(~mask, float("nan"))[:, order],
        "position": (geometry["position"] @ turn + 3).masked_fill(~mask[..., None], float("nan"))[:, order],
        "neighbors": place[geometry["neighbors"]][:, order],
    }
    moved = x.masked_fill(~mask[..., None], float("nan"))[:, order]
    actual = layer(moved, mask[:, order], **chosen(kind, rubbish))
    torch.testing.assert_close(actual, expected[:, order], atol=1e-5, rtol=1e-5)


@every_kind
def test_gradients_match_finite_differences(kind):
    layer, (x, mask, geometry) = conv(kind), inputs()
    x.requires_grad_()
    if kind == "graph":
        position = geometry.pop("position").requires_grad_()
        neighbors = geometry["neighbors"]
        function = lambda x, position: layer(x, mask, position=position, neighbors=neighbors)
        assert torch.autograd.gradcheck(function, (x, position))
    else:
        assert torch.autograd.gradcheck(lambda x: layer(x, mask, index=geometry["index"]), x)


@every_kind
def test_all_parameters_learn(kind):
    layer, (x, mask, geometry) = conv(kind), inputs()
    layer(x, mask, **chosen(kind, geometry)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().max()) > 0, name


@pytest.mark.parametrize("rows", [1, 4])
def test_blocks_change_nothing_and_keep_no_messages(monkeypatch, rows):
    layer, (x, mask, geometry) = conv("graph"), inputs()
    x.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        y = layer(x, mask, **chosen("graph", geometry))
        return y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    expected = run()
    monkeypatch.setattr(separable, "ENTRIES", rows * len(SIZES) * K * C)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        actual = run()
    torch.testing.assert_close(actual, expected)
    assert max(saved) < mask.numel() * K * C


@pytest.mark.parametrize(("kind", "depthwise"), [("sequence", 7 * 32), ("graph", 16 * 32)])
def test_the_number_of_weights_matches_the_formula(kind, depthwise):
    layer = SeparableConv(32, 24, kind=kind)
    assert sum(p.numel() for p in layer.parameters()) == depthwise + 32 * 24


def test_coincident_cells_have_a_finite_gradient():
    layer, (x, mask, geometry) = conv("graph"), inputs()
    position = torch.ones_like(geometry["position"]).requires_grad_()
    layer(x, mask, position=position, neighbors=geometry["neighbors"]).square().sum().backward()
    assert bool(position.grad.isfinite().all())


def test_autocast_does_not_round_positions():
    layer, (x, mask, geometry) = conv("graph").float(), inputs()
    geometry = {"position": geometry["position"].float() + 1000, "neighbors": geometry["neighbors"]}
    expected = layer(x.float(), mask, **geometry)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = layer(x.float(), mask, **geometry)
    torch.testing.assert_close(actual.float(), expected, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "grid"}, "kind='grid'"),
        ({"kind": "sequence", "kernel_size": 4}, "kernel_size=4"),
        ({"kind": "graph", "n_basis": 1}, "n_basis=1"),
        ({"kind": "graph", "max_distance": 0.0}, "max_distance=0"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        SeparableConv(C, C, **options)


def test_a_graph_needs_positions_and_neighbors():
    x, mask, geometry = inputs()
    with pytest.raises(ValueError, match="position.*neighbors"):
        conv("graph")(x, mask, position=geometry["position"])
