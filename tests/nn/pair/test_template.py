"""Templates of positions are functions of the distance; templates of all pairs are truncated decompositions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import special_ortho_group

from alphastomics.nn.pair import Template
from dense_pairs import DenseTemplate, factorize

dimensions = pytest.mark.parametrize("n_dims", [2, 3])


def make(n_dims: int) -> Template:
    torch.manual_seed(0)
    return Template(5, n_dims).double()


def positions(n_dims: int, n: int = 30) -> torch.Tensor:
    return torch.randn(2, n, n_dims, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@dimensions
def test_squared_distance_is_exact_at_rank_d_plus_2(n_dims):
    module, x = make(n_dims), positions(n_dims)
    factors = module(x)
    assert factors.rank == module.rank == n_dims + 2
    expected = torch.cdist(x, x).square()[..., None] / 36 * module.squared
    torch.testing.assert_close(factors.dense(), expected)


@dimensions
def test_rotations_and_reflections_change_nothing(n_dims):
    """Bar: 1e-4."""
    module, x = make(n_dims), positions(n_dims)
    p = module(x).dense().detach()
    for seed in range(5):
        turn = torch.from_numpy(special_ortho_group.rvs(n_dims, random_state=seed))
        turn[0] *= -1
        assert float((module(x @ turn).dense() - p).detach().abs().max()) <= 1e-10


@dimensions
def test_shifts_change_nothing(n_dims):
    module, x = make(n_dims), positions(n_dims)
    torch.testing.assert_close(module(x + 1e3).dense(), module(x).dense(), atol=1e-9, rtol=0)
    single = make(n_dims).float()
    far = (x + 100).float()
    torch.testing.assert_close(single(far).dense(), module(far.double()).dense().float(), atol=1e-5, rtol=0)


def test_padded_positions_have_no_effect(mask):
    module, x = make(2), positions(2, n=11)
    changed = x.masked_fill(~mask[..., None], float("nan"))
    p = module(changed, mask).dense()
    torch.testing.assert_close(p, module(x.masked_fill(~mask[..., None], 7.0), mask).dense())
    assert not p[1, ~mask[1]].any()
    torch.testing.assert_close(p[1][mask[1]][:, mask[1]], module(x[1:, mask[1]]).dense()[0])


@dimensions
def test_all_parameters_and_positions_receive_a_gradient(n_dims):
    module, x = make(n_dims), positions(n_dims).requires_grad_()
    module(x).dense().square().sum().backward()
    assert {name for name, parameter in module.named_parameters() if parameter.grad.all()} == {"squared"}
    assert bool(x.grad.isfinite().all())
    assert bool(x.grad.any())


def test_half_precision_does_not_round_positions():
    module, x = Template(4, 2), positions(2).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = module(x)
    torch.testing.assert_close(rounded.left, module(x).left)


def test_factorize_is_the_best_approximation(mask):
    p = torch.randn(2, 11, 11, 3, dtype=torch.float64)
    p = p * (mask[:, :, None] & mask[:, None])[..., None]
    rest = (factorize(p, 4, mask).dense() - p).square().sum(dim=(1, 2))
    spectrum = np.linalg.svd(np.moveaxis(p.numpy(), 3, 1), compute_uv=False)
    np.testing.assert_allclose(rest, (spectrum[..., 4:] ** 2).sum(-1), rtol=1e-12)
    torch.testing.assert_close(factorize(p, 11, mask).dense(), p)


def test_a_dense_template_is_a_learned_sum_of_its_channels(mask):
    torch.manual_seed(0)
    module = DenseTemplate(3, 5, rank=11).double()
    template = torch.randn(2, 11, 11, 3, dtype=torch.float64)
    factors = module(template, mask)
    expected = template @ module.weight.mT * (mask[:, :, None] & mask[:, None])[..., None]
    torch.testing.assert_close(factors.dense(), expected)
    assert factors.rank == module.rank == 33
    factors.dense().square().sum().backward()
    assert bool(module.weight.grad.all())


def test_invalid_templates_raise():
    with pytest.raises(ValueError, match="2049 cells"):
        factorize(torch.zeros(1, 2049, 2049, 1), 3)
    with pytest.raises(ValueError, match="rank=4"):
        factorize(torch.zeros(1, 3, 3, 1), 4)
