"""Residual streams against their formulas in double precision, and against the plain residual network."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from alphastomics.nn.residual import HyperConnection, expand, reduce, sinkhorn

if TYPE_CHECKING:
    from torch import Tensor

sizes = pytest.mark.parametrize("n_streams", [2, 3, 4])
D = 8


def random_logits(*shape: int, sd: float = 1.0, seed: int = 0) -> Tensor:
    return sd * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normalize(logits: np.ndarray, iterations: int) -> np.ndarray:
    """Sinkhorn's iterations, then algorithm 2 of Altschuler et al. (2017)."""
    h = np.exp(logits)
    for _ in range(iterations):
        h = h / h.sum(axis=-2, keepdims=True)
        h = h / h.sum(axis=-1, keepdims=True)
    h = h / np.maximum(h.sum(axis=-2, keepdims=True), 1)
    rows, columns = 1 - h.sum(axis=-1, keepdims=True), 1 - h.sum(axis=-2, keepdims=True)
    return h + rows * columns / np.maximum(rows.sum(axis=-2, keepdims=True), 1e-15)


def trained(n_streams: int, *, sd: float = 1.0, d_model: int = D, seed: int = 0) -> HyperConnection:
    """A connection in double precision whose maps differ from cell to cell."""
    connection = HyperConnection(d_model, n_streams=n_streams).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        connection.alpha.fill_(1)
        connection.bias.normal_(std=sd, generator=generator)
        connection.phi.normal_(std=sd / connection.phi.shape[0] ** 0.5, generator=generator)
    return connection


def branches(n: int, d_model: int = D) -> list[nn.Sequential]:
    return [
        nn.Sequential(
            nn.LayerNorm(d_model), nn.Linear(d_model, 2 * d_model), nn.GELU(), nn.Linear(2 * d_model, d_model)
        )
        for _ in range(n)
    ]


@pytest.mark.parametrize("n", [3, 4, 6])
@pytest.mark.parametrize("iterations", [1, 20])
def test_sinkhorn_normalizes_columns_and_rows_in_turn(n, iterations, monkeypatch):
    monkeypatch.setattr("alphastomics.nn.residual.N_ITERATIONS", iterations)
    logits = random_logits(5, 7, n, n, sd=2)
    expected = normalize(logits.numpy(), iterations)
    np.testing.assert_allclose(sinkhorn(logits), expected, atol=1e-10)


def test_sinkhorn_is_near_its_limit():
    logits = random_logits(500, 4, 4, sd=2)
    assert np.abs(sinkhorn(logits).numpy() - normalize(logits.numpy(), 2000)).mean() < 1e-3


def test_sinkhorn_of_two_streams_is_the_limit():
    logits = random_logits(50, 2, 2, sd=2)
    np.testing.assert_allclose(sinkhorn(logits), normalize(logits.numpy(), 5000), atol=1e-10)


@pytest.mark.parametrize("sd", [1, 4])
@pytest.mark.parametrize("identity", [0, 8])
@sizes
def test_rows_and_columns_sum_to_one(n_streams, sd, identity):
    logits = random_logits(4000, n_streams, n_streams, sd=sd) + identity * torch.eye(n_streams)
    h = sinkhorn(logits.float())
    assert float((h.sum(-1) - 1).abs().max()) < 1e-6
    assert float((h.sum(-2) - 1).abs().mean()) < 1e-2  # the iterations alone
    assert float((h.sum(-2) - 1).abs().max()) < 1e-5
    assert bool((h >= 0).all())


@sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sinkhorn_is_finite_for_any_logits(n_streams, dtype):
    logits = random_logits(200, n_streams, n_streams, sd=1e4).to(dtype).requires_grad_()
    h = sinkhorn(logits)
    assert h.dtype == torch.float32
    assert float((h.detach().sum(-1) - 1).abs().max()) < 1e-6
    (gradient,) = torch.autograd.grad(h.square().sum(), logits)
    assert bool(gradient.isfinite().all())


@sizes
def test_gradients_of_sinkhorn_match_finite_differences(n_streams):
    assert torch.autograd.gradcheck(sinkhorn, random_logits(3, n_streams, n_streams).requires_grad_())


def test_the_iterations_are_not_kept():
    logits, sizes = random_logits(100, 4, 4).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        sinkhorn(logits)
    assert sum(sizes) <= 2 * logits.numel()


@sizes
def test_a_layer_matches_the_formula(n_streams):
    connection = trained(n_streams)
    streams = random_logits(2, 5, n_streams, D, seed=1)
    (branch,) = (branch.double() for branch in branches(1))
    phi, bias = connection.phi.detach().numpy(), connection.bias.detach().numpy()
    for b, i in itertools.product(range(2), range(5)):
        x = streams[b, i].numpy()
        z = (x.flatten() / np.sqrt((x**2).mean())) @ phi + bias
        pre = 1 / (1 + np.exp(-z[:n_streams]))
        post = 2 / (1 + np.exp(-z[n_streams : 2 * n_streams]))
        rest = z[2 * n_streams :]
        mix = normalize(rest.reshape(n_streams, n_streams), 20 if n_streams > 2 else 5000)
        y = branch(torch.from_numpy(pre @ x)).detach().numpy()
        expected = mix @ x + post[:, None] * y
        actual = connection(streams, branch)[b, i].detach()
        np.testing.assert_allclose(actual, expected, atol=1e-5)


@sizes
def test_at_first_64_layers_are_the_plain_residual_network(n_streams):
    x = random_logits(2, 11, D).float()
    streams, plain = expand(x, n_streams), x
    with torch.no_grad():
        for branch in branches(64):
            streams = HyperConnection(D, n_streams=n_streams)(streams, branch)
            plain = plain + branch(plain)
    assert float((plain - x).abs().max()) > 1
    assert float((reduce(streams) - plain).abs().max() / plain.abs().max()) < 1e-4


def test_training_and_evaluation_are_the_same():
    connection, streams = trained(4), random_logits(2, 5, 4, D)
    training = connection.train()(streams, nn.Identity())
    assert torch.equal(training, connection.eval()(streams, nn.Identity()))


@sizes
@pytest.mark.parametrize(("sd", "start"), [(1.0, True), (4.0, True), (4.0, False)])
def test_the_product_over_64_layers_neither_grows_nor_vanishes(n_streams, sd, start):
    product = torch.eye(n_streams)
    for layer in range(64):
        first = HyperConnection(D, n_streams=n_streams).bias.detach()
        connection = trained(n_streams, sd=sd, seed=layer).float()
        with torch.no_grad():
            connection.bias += start * first
            product = connection.maps(random_logits(20, 10, n_streams, D, seed=layer).float()).mix @ product
    for axis in (-1, -2):
        assert float(product.sum(axis).max()) <= 1.05
        assert float((product.sum(axis) - 1).abs().max()) < 1e-4


def test_all_parameters_learn_and_the_streams_diverge():
    x, target = random_logits(2, 9, D).float(), random_logits(2, 9, D, seed=1).float()
    network = nn.ModuleList([HyperConnection(D, n_streams=3) for _ in range(3)])
    layers = nn.ModuleList(branches(3))
    optimizer = torch.optim.Adam([*network.parameters(), *layers.parameters()], lr=1e-2)
    moved = {name: 0.0 for name, _ in network.named_parameters()}
    for _ in range(20):
        streams = expand(x, 3)
        for connection, branch in zip(network, layers, strict=True):
            streams = connection(streams, branch)
        optimizer.zero_grad()
        (reduce(streams) - target).square().mean().backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None
            moved[name] = max(moved[name], float(parameter.grad.abs().max()))
        optimizer.step()
    assert all(value > 0 for value in moved.values()), moved
    assert float(streams.detach().std(dim=-2).max()) > 1e-3


@given(seed=st.integers(0, 1000))
def test_padding_comes_out_as_zero_and_cells_do_not_see_each_other(seed):
    connection, streams = trained(3), random_logits(2, 6, 3, D, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    mask, order = torch.rand(2, 6, generator=generator) < 0.6, torch.randperm(6, generator=generator)
    (branch,) = (branch.double() for branch in branches(1))
    expected = connection(streams, branch, mask)
    assert not bool(expected[~mask].any())
    rubbish = torch.where(mask[..., None, None], streams, float("nan"))
    actual = connection(rubbish[:, order], branch, mask[:, order])
    torch.testing.assert_close(actual, expected[:, order])


def test_under_autocast_the_streams_and_their_maps_keep_single_precision():
    connection, streams = trained(4, sd=2).float(), random_logits(2, 50, 4, D).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        maps = connection.maps(streams)
        kept = connection(streams, torch.zeros_like)
    assert float((maps.mix.detach().sum(-1) - 1).abs().max()) < 1e-6
    torch.testing.assert_close(kept, connection(streams, torch.zeros_like))


def test_half_precision_streams_stay_in_half_precision():
    connection = HyperConnection(D).bfloat16()
    streams = random_logits(2, 50, 4, D).bfloat16()
    result = connection(streams, nn.Identity())
    assert result.dtype == torch.bfloat16
    assert bool(result.isfinite().all())


def test_streams_are_expanded_and_reduced():
    x = random_logits(2, 5, D)
    assert expand(x, 3).shape == (2, 5, 3, D)
    torch.testing.assert_close(reduce(expand(x, 3)), x)


def test_a_single_stream_is_an_error():
    with pytest.raises(ValueError, match="n_streams=1"):
        HyperConnection(D, n_streams=1)
