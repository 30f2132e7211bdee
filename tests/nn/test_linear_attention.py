"""Linear attention against its formula in float64, and diagnostics of every kind of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

from alphastomics.nn import DenoiserConfig, LinearAttention, SoftmaxAttention, make_attention

KINDS = {
    "linear": lambda: LinearAttention(16, 4),
    "full": lambda: SoftmaxAttention(16, 4),
    "plain": lambda: SoftmaxAttention(16, 4, gate_type="none", use_qk_norm=False),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind: str):
    torch.manual_seed(0)
    module = KINDS[kind]().double()
    with torch.no_grad():
        for name, layer in module.named_children():
            if name in ("q", "kv", "qkv"):
                layer.weight *= 3  # attention that is far from uniform
    return module


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture
def mask() -> torch.Tensor:
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, [2, 5]] = False
    return mask


def affine(layer: torch.nn.Linear, x: np.ndarray) -> np.ndarray:
    return x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()


def dense(module: LinearAttention, x: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Output and attention matrices of one context, head by head."""
    heads, matrices = [], []
    for h in range(module.n_heads):
        channels = slice(h * module.d_head, (h + 1) * module.d_head)
        q, k, v = (part[:, channels] for part in np.split(affine(module.qkv, x), 3, axis=1))
        matrix = softmax(q, axis=1) @ softmax(np.where(mask[:, None], k, -np.inf), axis=0).T
        heads.append(matrix @ v)
        matrices.append(matrix)
    return affine(module.out, np.concatenate(heads, axis=1)), np.stack(matrices)


def test_linear_attention_matches_the_formula(x, mask):
    module = make("linear")
    actual, weights = module(x, mask=mask).detach(), module.weights(x, torch.arange(7), mask=mask).detach()
    for i in range(2):
        out, matrices = dense(module, x[i].numpy(), mask[i].numpy())
        np.testing.assert_allclose(actual[i], out, atol=1e-12)
        np.testing.assert_allclose(weights[i], matrices, atol=1e-12)


@kinds
def test_no_cell_attends_to_masked_cells(kind, x):
    module, mask = make(kind), torch.arange(7) < 5
    changed = x.clone()
    changed[:, 5:] = 1e3
    torch.testing.assert_close(module(changed, mask=mask.expand(2, 7))[:, :5], module(x[:, :5]))


@kinds
def test_order_of_the_cells_carries_no_meaning(kind, x):
    module, order = make(kind), torch.randperm(7)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order])


def test_linear_attention_needs_memory_for_the_cells_alone():
    n = 4096
    module = LinearAttention(8, 1)
    largest = [0]

    def watch(_, __, result):
        largest[0] = max(largest[0], result.numel())

    for part in module.modules():
        part.register_forward_hook(watch)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: largest.append(t.numel()) or t, lambda t: t):
        module(torch.randn(1, n, 8)).sum().backward()
    assert max(largest) <= 3 * n * 8


@kinds
@pytest.mark.parametrize("masked", [True, False])
def test_weights_are_those_that_attention_uses(kind, masked, x, mask):
    """Rows sum to 1, and they mix the values to what the module returns."""
    module, mask = make(kind), mask if masked else None
    weights = module.weights(x, torch.arange(7), mask=mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7, dtype=torch.float64))
    values = module.qkv(x)[..., 32:] if kind == "linear" else module.kv(x)[..., 16:]
    v = values.view(2, 7, 4, 4).transpose(1, 2)
    mixed = (weights @ v).transpose(1, 2)
    gates = module.gates(x)
    if gates is not None:
        assert bool(((gates > 0) & (gates < 1)).all())
        mixed = mixed * gates.view(2, 7, 4, -1)
    torch.testing.assert_close(module.out(mixed.reshape(2, 7, 16)), module(x, mask=mask))
    rows = torch.tensor([4, 1])
    torch.testing.assert_close(module.weights(x, rows, mask=mask), weights[:, :, rows])


@kinds
@pytest.mark.parametrize("masked", [True, False])
def test_received_attention_is_the_mean_over_real_cells(kind, masked, x, mask, monkeypatch):
    monkeypatch.setattr("alphastomics.nn.attention.softmax.BLOCK", 2 * 4 * 7 * 3)  # three rows at a time
    module, mask = make(kind), mask if masked else torch.ones_like(mask)
    weights = module.weights(x, torch.arange(7), mask=mask)
    expected = torch.stack([weights[i][:, mask[i]].mean(1) for i in range(2)])
    torch.testing.assert_close(module.received(x, mask=mask if masked else None), expected)


def made(**options: Any) -> torch.nn.Module:
    """The attention of a small network."""
    return make_attention(DenoiserConfig(**({"n_genes": 1, "n_dims": 2, "d_model": 16, "n_heads": 4} | options)))


def test_kinds_are_made_by_name():
    assert isinstance(made(attention="linear"), LinearAttention)
    elementwise = made(gate_type="elementwise", use_qk_norm=False)
    assert elementwise.gate.weight.shape == (16, 16)
    assert isinstance(elementwise.q_norm, torch.nn.Identity)


def test_linear_attention_has_neither_gate_nor_norms():
    assert sum(p.numel() for p in made(attention="linear").parameters()) == 4 * (16 * 16 + 16)
    assert made(attention="linear").gates(torch.zeros(1, 2, 16)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attention": "sparse"}, "attention='sparse'"),
        ({"attention": "linear", "gate_type": "elementwise"}, "gate_type='elementwise'"),
        ({"attention": "linear", "d_model": 30}, "d_model=30.*n_heads=4"),
    ],
)
def test_invalid_arguments_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        made(**arguments)
