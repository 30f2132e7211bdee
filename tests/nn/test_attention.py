"""Attention against its formula in float64, and the arithmetic of its gates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax

from alphastomics.nn import SoftmaxAttention
from largest_tensor import LargestTensor

GATES = ["headwise", "elementwise", "none"]


def attention(d_model: int = 16, n_heads: int = 4, *, dtype: torch.dtype = torch.float64, **kwargs) -> SoftmaxAttention:
    torch.manual_seed(0)
    module = SoftmaxAttention(d_model, n_heads, **kwargs)
    for norm in (module.q_norm, module.k_norm):
        for scale in norm.parameters():
            torch.nn.init.normal_(scale, mean=1.0, std=0.3)
    return module.to(dtype)


def cells(b: int = 2, n: int = 7, d: int = 16) -> torch.Tensor:
    return torch.randn(b, n, d, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def linear(layer: torch.nn.Linear, x: np.ndarray) -> np.ndarray:
    bias = 0 if layer.bias is None else layer.bias.detach().numpy()
    return x @ layer.weight.detach().numpy().T + bias


def dense(module: SoftmaxAttention, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """One context, head by head."""
    d_head = min(x.shape[1] // module.n_heads, 32)
    heads = []
    for h in range(module.n_heads):
        channels = slice(h * d_head, (h + 1) * d_head)
        parts = linear(module.q, x), *np.split(linear(module.kv, x), 2, axis=1)
        q, k, v = (part[:, channels] for part in parts)
        if list(module.q_norm.parameters()):
            q, k = (
                y / np.sqrt((y**2).mean(1, keepdims=True)) * norm.scale.detach().numpy()
                for y, norm in ((q, module.q_norm), (k, module.k_norm))
            )
        scores = np.where(mask[None], q @ k.T / np.sqrt(d_head), -np.inf)
        out = softmax(scores, axis=1) @ v
        if module.gate is not None:
            gate = expit(linear(module.gate, x))
            out = out * (gate[:, h : h + 1] if gate.shape[1] == module.n_heads else gate[:, channels])
        heads.append(out)
    return linear(module.out, np.concatenate(heads, axis=1))


@pytest.mark.parametrize("gate_type", GATES)
@pytest.mark.parametrize("use_qk_norm", [True, False])
@pytest.mark.parametrize("sizes", [(16, 4), (128, 2)])
def test_attention_matches_the_formula(sizes, gate_type, use_qk_norm):
    module, x = attention(*sizes, gate_type=gate_type, use_qk_norm=use_qk_norm), cells(d=sizes[0])
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, [2, 5]] = False
    actual = module(x, mask=mask).detach()
    for i in range(2):
        np.testing.assert_allclose(actual[i], dense(module, x[i].numpy(), mask[i].numpy()), atol=1e-9)
    torch.testing.assert_close(module(x[:1]).detach(), actual[:1])


@pytest.mark.parametrize("gate_type", GATES)
def test_no_cell_attends_to_masked_cells(gate_type):
    module, x = attention(gate_type=gate_type), cells()
    mask = torch.arange(7) < 5
    changed = x.clone()
    changed[:, 5:] = 1e3
    torch.testing.assert_close(module(changed, mask=mask.expand(2, 7))[:, :5], module(x[:, :5]))


@pytest.mark.parametrize("n", [1, 7, 8])
def test_in_training_cells_attend_to_every_third(n):
    module, x = attention(key_stride=3).train(), cells(n=n)
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, n // 2 + 1 :] = False
    third = np.arange(n) % 3 == 0
    for i, actual in enumerate(module(x, mask=mask).detach()):
        np.testing.assert_allclose(actual, dense(module, x[i].numpy(), mask[i].numpy() & third), atol=1e-9)
    torch.testing.assert_close(module(x[:1]), module(x, mask=mask)[:1])
    np.testing.assert_allclose(
        module.eval()(x)[0].detach(), dense(module, x[0].numpy(), np.ones(n, dtype=bool)), atol=1e-9
    )


def test_every_cell_attends_to_every_other():
    module, x = attention(), cells(b=1).requires_grad_()
    for i in range(7):
        (gradient,) = torch.autograd.grad(module(x)[0, i].sum(), x)
        assert bool((gradient[0].abs().sum(1) > 0).all())


@pytest.mark.parametrize(("gate_type", "more"), [("headwise", 2_048), ("elementwise", 65_536)])
def test_parameters_of_the_gates(gate_type, more):
    def count(gate_type: str) -> int:
        return sum(p.numel() for p in SoftmaxAttention(256, 8, gate_type=gate_type).parameters())

    assert count(gate_type) - count("none") == more


def test_parameters_of_the_query_and_key_norms():
    sizes = [sum(p.numel() for p in attention(use_qk_norm=use).parameters()) for use in (True, False)]
    assert sizes[0] - sizes[1] == 2 * 4  # one scale per channel of a head, for q and for k


def test_norms_bound_the_scores():
    """With qk-norm the sharpness of attention cannot be bought with the size of the weights."""
    module, x = attention(use_qk_norm=True), cells()
    expected = module(x)
    with torch.no_grad():
        for layer in (module.q, module.kv):
            layer.weight[:16] *= 100
            layer.bias[:16] *= 100
    torch.testing.assert_close(module(x), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_the_attention_matrix_is_never_formed(masked):
    n, d = 1024, 8
    module = attention(d, 1, dtype=torch.float32)
    x = torch.randn(1, n, d, requires_grad=True)
    mask = (torch.arange(n) < n - 3)[None] if masked else None
    with LargestTensor() as largest:
        module(x, mask=mask).sum().backward()
    assert 2 * n * d <= largest.entries < n * n / 8


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="d_model=30"):
        SoftmaxAttention(30, 4)
    with pytest.raises(ValueError, match="gate_type='both'"):
        SoftmaxAttention(32, 4, gate_type="both")
